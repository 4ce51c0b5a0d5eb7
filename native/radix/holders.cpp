#include "radix/holders.h"

#include <algorithm>

namespace baton::radix {

namespace {

std::uint32_t hash_words(std::uint32_t first_group, const std::uint64_t* words, std::size_t count) {
  std::uint64_t hash = first_group + 0x9e3779b97f4a7c15u;
  for (std::size_t at = 0; at < count; ++at) {
    hash = (hash ^ words[at]) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
  }
  return static_cast<std::uint32_t>(hash);
}

}  // namespace

HolderSet::HolderSet(std::uint32_t first_group, const std::uint64_t* words, std::uint32_t groups)
    : first_group_(first_group), groups_(groups) {
  if (words_count() <= few_.size()) {
    std::copy_n(words, words_count(), few_.begin());
  } else {
    many_ = std::make_unique<std::uint64_t[]>(words_count());
    std::copy_n(words, words_count(), many_.get());
  }
}

HolderSets::HolderSets() : buckets_(64, kNoHolders) {
  records_.take();  // kNoHolders: the empty set.
  records_[kNoHolders].nodes = 1;
}

SetNumber HolderSets::with(SetNumber set, Holder holder) {
  return (*this)[set].contains(holder) ? set : changed(set, holder);
}

SetNumber HolderSets::without(SetNumber set, Holder holder) {
  return (*this)[set].contains(holder) ? changed(set, holder) : set;
}

SetNumber HolderSets::changed(SetNumber set, Holder holder) {
  const HolderSet& old = (*this)[set];
  const std::uint32_t group = holder.worker / 64;
  const bool empty = old.words_count() == 0;
  std::uint32_t first = empty ? group : std::min(old.first_group(), group);
  std::uint32_t end = empty ? group + 1 : std::max(old.end_group(), group + 1);
  scratch_.assign((end - first) * kTiers, 0);
  if (!empty) std::copy_n(old.words(), old.words_count(), scratch_.begin() + (old.first_group() - first) * kTiers);
  scratch_[(group - first) * kTiers + static_cast<std::uint32_t>(holder.tier)] ^= std::uint64_t{1}
                                                                                  << (holder.worker % 64);
  const std::uint64_t* words = scratch_.data();
  const auto is_empty = [&](std::uint32_t at) {
    const std::uint64_t* group_words = words + (at - first) * kTiers;
    return std::all_of(group_words, group_words + kTiers, [](std::uint64_t word) { return word == 0; });
  };
  std::uint32_t used_first = first;
  while (used_first < end && is_empty(used_first)) ++used_first;
  while (end > used_first && is_empty(end - 1)) --end;
  if (used_first == end) return kNoHolders;
  return intern(used_first, words + (used_first - first) * kTiers, end - used_first);
}

SetNumber HolderSets::intern(std::uint32_t first_group, const std::uint64_t* words, std::uint32_t groups) {
  const std::uint32_t hash = hash_words(first_group, words, groups * kTiers);
  for (SetNumber at = bucket(hash); at != kNoHolders; at = records_[at].next) {
    const Record& record = records_[at];
    if (record.hash == hash && record.set.first_group() == first_group &&
        record.set.end_group() == first_group + groups &&
        std::equal(words, words + groups * kTiers, record.set.words())) {
      return at;
    }
  }
  const SetNumber number = records_.take();
  Record& record = records_[number];
  record.set = HolderSet(first_group, words, groups);
  record.hash = hash;
  record.next = bucket(hash);
  bucket(hash) = number;
  if (groups > 1) words_bytes_ += groups * kTiers * sizeof(std::uint64_t);
  return number;
}

void HolderSets::forget(SetNumber set) {
  Record& record = records_[set];
  SetNumber* link = &bucket(record.hash);
  while (*link != set) link = &records_[*link].next;
  *link = record.next;
  if (record.set.words_count() > kTiers) words_bytes_ -= record.set.words_count() * sizeof(std::uint64_t);
  records_.give(set);
}

void HolderSets::prepare() {
  records_.prepare();
  if (records_.size() < buckets_.size()) return;
  buckets_.assign(buckets_.size() * 2, kNoHolders);
  for (SetNumber set = 1; set < records_.end(); ++set) {
    Record& record = records_[set];
    if (record.nodes == 0) continue;
    record.next = bucket(record.hash);
    bucket(record.hash) = set;
  }
}

std::size_t HolderSets::bytes() const {
  return records_.bytes() + words_bytes_ + buckets_.capacity() * sizeof(SetNumber);
}

}  // namespace baton::radix
