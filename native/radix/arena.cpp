#include "radix/arena.h"

#include <algorithm>
#include <bit>

namespace baton::radix {

namespace {

std::uint32_t list_of(std::uint32_t length) {
  return static_cast<std::uint32_t>(std::bit_width(length)) - 1;
}

constexpr int kLooks = 8;  // Number of stretches tried in a list whose stretches may be too short.

}  // namespace

Arena::Arena() {
  lists_.fill(kNone);
}

void Arena::set_owner(std::uint32_t first, std::uint32_t count, std::uint32_t node) {
  std::fill_n(&owner(first), count, node);
}

std::uint32_t Arena::take(std::uint32_t count) {
  std::uint32_t first = find(count);
  if (first == kNone) {
    add_chunk();
    first = find(count);
  }
  return cut(first, count);
}

std::uint32_t Arena::extend(std::uint32_t first, std::uint32_t count) {
  if (first % kChunkSlots == 0 || !is_free(first)) return 0;
  const std::uint32_t taken = std::min(stretch(first).length, count);
  cut(first, taken);
  return taken;
}

void Arena::give(std::uint32_t first, std::uint32_t count) {
  std::uint32_t end = first + count;
  if (first % kChunkSlots != 0 && is_free(first - 1)) {
    first -= stretch(first - 1).length;
    delist(first);
  }
  if (end % kChunkSlots != 0 && is_free(end)) {
    const std::uint32_t after = stretch(end).length;
    delist(end);
    end += after;
  }
  if (end - first == kChunkSlots) {
    empty_.push_back(first >> kChunkBits);
    chunks_[first >> kChunkBits].reset();
  } else {
    enlist(first, end - first);
  }
}

void Arena::prepare() {
  if (spare_ == nullptr) spare_ = std::make_unique<Chunk>();
}

Arena::Stretch Arena::stretch(std::uint32_t first) const {
  Stretch out;
  std::memcpy(&out, &id(first), sizeof(out));
  return out;
}

void Arena::write(std::uint32_t first, Stretch stretch) {
  std::memcpy(static_cast<void*>(&id(first)), &stretch, sizeof(stretch));
}

void Arena::enlist(std::uint32_t first, std::uint32_t count) {
  std::uint32_t& head = lists_[list_of(count)];
  const std::uint32_t last = first + count - 1;
  write(last, {count, kNone, kNone});
  write(first, {count, kNone, head});
  owner(first) = owner(last) = kFree;
  if (head != kNone) {
    Stretch after = stretch(head);
    after.before = first;
    write(head, after);
  }
  head = first;
}

void Arena::delist(std::uint32_t first) {
  const Stretch gone = stretch(first);
  if (gone.before == kNone) {
    lists_[list_of(gone.length)] = gone.after;
  } else {
    Stretch before = stretch(gone.before);
    before.after = gone.after;
    write(gone.before, before);
  }
  if (gone.after != kNone) {
    Stretch after = stretch(gone.after);
    after.before = gone.before;
    write(gone.after, after);
  }
  // Neither end may look free any longer, for what lies beside it.
  owner(first) = owner(first + gone.length - 1) = 0;
}

std::uint32_t Arena::find(std::uint32_t count) const {
  const std::uint32_t shortest = list_of(count);
  std::uint32_t at = lists_[shortest];
  for (int looks = 0; at != kNone && looks < kLooks; ++looks, at = stretch(at).after) {
    if (stretch(at).length >= count) return at;
  }
  for (std::uint32_t list = shortest + 1; list < lists_.size(); ++list) {
    if (lists_[list] != kNone) return lists_[list];
  }
  return kNone;
}

std::uint32_t Arena::cut(std::uint32_t first, std::uint32_t count) {
  const std::uint32_t length = stretch(first).length;
  delist(first);
  if (length > count) enlist(first + count, length - count);
  return first;
}

void Arena::add_chunk() {
  prepare();
  std::uint32_t number = static_cast<std::uint32_t>(chunks_.size());
  if (empty_.empty()) {
    chunks_.push_back(std::move(spare_));
  } else {
    number = empty_.back();
    empty_.pop_back();
    chunks_[number] = std::move(spare_);
  }
  enlist(number << kChunkBits, kChunkSlots);
}

}  // namespace baton::radix
