// The parts of the index, and both indexes against the oracle.
#include "radix/tree.h"
#include "tests/baseline/flat.h"
#include "tests/check.h"
#include "tests/radix_world.h"

using namespace baton::tests;

TEST(a_table_finds_what_it_holds_whatever_was_erased_before) {
  std::mt19937_64 random(1);
  SlotTable table(4);
  std::map<std::uint32_t, std::uint32_t> hashes;
  for (std::uint32_t step = 0; step < 20'000; ++step) {
    if (random() % 5 < 3) {
      if (table.is_crowded(1)) table = table.grown();
      // Few different homes, so that runs of entries are long and wrap around.
      const auto hash = static_cast<std::uint32_t>(random() % 8 * 0x20000001u + random() % 3);
      table.insert(hash, step);
      hashes[step] = hash;
    } else if (!hashes.empty()) {
      auto gone = hashes.lower_bound(static_cast<std::uint32_t>(random() % step));
      if (gone == hashes.end()) gone = hashes.begin();
      table.erase(gone->second, gone->first);
      CHECK(table.find(gone->second, [&](std::uint32_t slot) { return slot == gone->first; }) == kNone);
      hashes.erase(gone);
    }
    if (step % 500 != 0) continue;
    for (const auto& [slot, hash] : hashes) {
      CHECK(table.find(hash, [&, want = slot](std::uint32_t found) { return found == want; }) == slot);
    }
    if (hashes.size() > 400) {
      for (const auto& [slot, hash] : hashes) table.erase(hash, slot);
      hashes.clear();
    }
  }
  CHECK(table.size() == hashes.size());
}

TEST(an_arena_gives_each_slot_once_and_takes_all_back) {
  std::mt19937_64 random(2);
  Arena arena;
  std::map<std::uint32_t, std::uint32_t> taken;
  std::size_t in_use = 0;
  for (int step = 0; step < 20'000; ++step) {
    const auto count = static_cast<std::uint32_t>(1 + random() % (random() % 8 == 0 ? 5000 : 40));
    if (in_use < 150'000 && random() % 9 < 5) {
      const std::uint32_t first = arena.take(count);
      const auto after = taken.lower_bound(first);
      CHECK(after == taken.end() || first + count <= after->first);
      CHECK(after == taken.begin() || std::prev(after)->first + std::prev(after)->second <= first);
      CHECK(first / Arena::kChunkSlots == (first + count - 1) / Arena::kChunkSlots);
      arena.set_owner(first, count, 7);
      taken[first] = count;
      in_use += count;
    } else if (!taken.empty()) {
      auto at = taken.lower_bound(static_cast<std::uint32_t>(random() % (taken.rbegin()->first + 1)));
      if (random() % 2 == 0) {
        const std::uint32_t more = arena.extend(at->first + at->second, count);
        CHECK(more <= count);
        if (more > 0) arena.set_owner(at->first + at->second, more, 7);
        at->second += more;
        in_use += more;
      } else {
        arena.give(at->first, at->second);
        in_use -= at->second;
        taken.erase(at);
      }
    }
  }
  for (const auto& [first, count] : taken) arena.give(first, count);
  CHECK(arena.slots() == 0);
}

TEST(sets_with_the_same_holders_have_the_same_number) {
  HolderSets sets;
  sets.prepare();
  const Holder near{3, Tier::active}, far{4000, Tier::history};
  const SetNumber one = sets.with(kNoHolders, near);
  sets.add_node(one);
  const SetNumber both = sets.with(one, far);
  sets.add_node(both);
  const SetNumber other = sets.with(kNoHolders, far);
  sets.add_node(other);
  CHECK(sets.with(other, near) == both);
  CHECK(sets.without(both, far) == one);
  CHECK(sets.without(both, near) == other);
  CHECK(sets.without(one, near) == kNoHolders);
  CHECK(sets[both].contains(near) && sets[both].contains(far) && !sets[both].contains({4000, Tier::active}));
  CHECK(!sets[other].contains(near) && sets[other].first_group() == 4000 / 64);
  for (const SetNumber set : {one, both, other}) sets.drop_node(set);
  CHECK(sets.size() == 1);
}

namespace {

template <class Core>
class Fuzz {
 public:
  static constexpr std::uint32_t kWorkers = 70;  // Two words of a set.

  Fuzz(std::uint64_t seed, std::size_t prompts, std::size_t blocks_max)
      : random_(seed), prompts_(make_prompts(random_, prompts, blocks_max)) {}

  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      const Holder holder{pick_worker(), random_() % 2 == 0 ? Tier::active : kAllTiers[random_() % kTiers]};
      const Prompt& prompt = prompts_[random_() % prompts_.size()];
      switch (random_() % 16) {
        case 0:
          clear(holder.worker);
          break;
        case 1:
          reload(holder, {pick_worker(), Tier::active});
          break;
        case 2:
        case 3:
        case 4:
          remove_some(holder, prompt);
          break;
        case 5:
        case 6:
        case 7:
          remove_run(holder, prompt);
          break;
        default:
          store(holder, prompt);
      }
      std::vector<Held> held;
      const Prompt& asked = prompts_[random_() % prompts_.size()];
      index_.match(view(asked), leading_, held);
      CHECK(same(held, oracle_.match(asked, kWorkers)));
      if (step % 50 == 0) check_size();
    }
    for (std::uint32_t worker = 0; worker < kWorkers; ++worker) clear(worker);
    check_size();
    const Size size = index_.size();
    CHECK(size.ghosts == 0 && size.nodes == 0 && size.sets == 0);
  }

 private:
  // Few workers do most, so that nodes are shared.
  std::uint32_t pick_worker() {
    return static_cast<std::uint32_t>(random_() % 3 == 0 ? random_() % kWorkers : 63 + random_() % 3);
  }

  void store(Holder holder, const Prompt& prompt) {
    const std::size_t from = random_() % 2 == 0 ? 0 : random_() % prompt.size();
    const std::size_t count = 1 + random_() % (prompt.size() - from);
    std::optional<Id> parent;
    if (from > 0) parent = prompt[from - 1];
    std::size_t fresh = 0, expected = 0;
    const Status status = index_.store(holder, parent, view(prompt, from, count), fresh);
    if (parent && !oracle_.holds(holder.worker, *parent)) {
      CHECK(status == Status::unknown_parent && fresh == 0);
      return;
    }
    for (std::size_t at = from; at < from + count; ++at) expected += oracle_.of(holder).insert(prompt[at]).second;
    CHECK(status == Status::ok && fresh == expected);
  }

  void remove(Holder holder, const Prompt& blocks) {
    std::size_t expected = 0;
    for (const Id& id : blocks) expected += oracle_.of(holder).erase(id);
    CHECK(index_.remove(holder, view(blocks)) == expected);
  }

  void remove_some(Holder holder, const Prompt& prompt) {
    Prompt blocks;
    for (const Id& id : prompt) {
      if (random_() % 8 == 0) blocks.push_back(id);
    }
    std::shuffle(blocks.begin(), blocks.end(), random_);
    remove(holder, blocks);
  }

  void remove_run(Holder holder, const Prompt& prompt) {
    const auto from = static_cast<std::ptrdiff_t>(random_() % prompt.size());
    Prompt blocks(prompt.begin() + from, prompt.end());
    blocks.resize(1 + random_() % blocks.size());
    if (random_() % 2 == 0) std::reverse(blocks.begin(), blocks.end());
    remove(holder, blocks);
  }

  void clear(std::uint32_t worker) {
    std::size_t expected = 0;
    for (const Tier tier : kAllTiers) expected += std::exchange(oracle_.of({worker, tier}), {}).size();
    CHECK(index_.clear(worker) == expected);
  }

  // Blocks of one holder are dumped and loaded into another, in any order.
  void reload(Holder into, Holder from) {
    std::vector<Run> runs = index_.dump(from);
    std::shuffle(runs.begin(), runs.end(), random_);
    std::vector<typename Index<Core>::Part> parts;
    for (const Run& run : runs) parts.push_back({run.parent, view(run.blocks)});
    CHECK(index_.load(into, parts) == Status::ok);
    if (into == from) return;
    oracle_.of(into) = oracle_.of(from);
  }

  void check_size() {
    const Size mine = index_.size(), theirs = oracle_.size();
    CHECK(mine.blocks == theirs.blocks && mine.holdings == theirs.holdings);
    for (std::uint32_t worker = 0; worker < kWorkers; ++worker) {
      for (const Tier tier : kAllTiers) {
        const Holder holder{worker, tier};
        const Sum sum = index_.sum(holder), expected = oracle_.sum(holder);
        CHECK(sum.blocks == expected.blocks && sum.ids == expected.ids);
      }
    }
  }

  std::mt19937_64 random_;
  std::vector<Prompt> prompts_;
  Index<Core> index_;
  Oracle oracle_;
  Leading leading_;
};

}  // namespace

TEST(a_tree_of_short_prompts_is_like_the_oracle) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) Fuzz<Tree>(seed, 8, 9).run(400);
}

TEST(a_tree_of_prompts_longer_than_a_batch_is_like_the_oracle) {
  for (std::uint64_t seed = 0; seed < 6; ++seed) Fuzz<Tree>(100 + seed, 8, 900).run(300);
}

TEST(a_tree_of_prompts_longer_than_a_node_or_a_chunk_is_like_the_oracle) {
  Fuzz<Tree>(200, 3, 20'000).run(40);
}

TEST(a_flat_table_is_like_the_oracle) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) Fuzz<Flat>(300 + seed, 8, 9).run(400);
  Fuzz<Flat>(400, 8, 900).run(200);
}

TEST(a_tree_keeps_what_its_edges_are) {
  std::mt19937_64 random(5);
  Prompt path;
  while (path.size() < 600) path.push_back({random(), random()});
  Index<Tree> index;
  std::size_t fresh = 0;
  const Holder a{0, Tier::active}, b{1, Tier::active};
  CHECK(index.store(a, std::nullopt, view(path), fresh) == Status::ok);
  CHECK(index.size().nodes == 1);
  // A second worker comes chunk by chunk: what both have joins into one node again.
  for (std::size_t at = 0; at < path.size(); at += 60) {
    std::optional<Id> parent;
    if (at > 0) parent = path[at - 1];
    CHECK(index.store(b, parent, view(path, at, 60), fresh) == Status::ok);
    CHECK(index.size().nodes == (at + 60 < path.size() ? 2 : 1));
  }
  // It forgets block by block from the end, and what only the first has joins as well.
  for (std::size_t at = path.size(); at-- > 500;) {
    CHECK(index.remove(b, view(path, at, 1)) == 1);
    CHECK(index.size().nodes == 2);
  }
  CHECK(index.clear(1) == 500);
  CHECK(index.size().nodes == 1);
  CHECK(index.clear(0) == 600);
  CHECK(index.size().nodes == 0);
}

TEST(ids_that_run_in_a_circle_do_no_harm) {
  std::mt19937_64 random(6);
  const Prompt x = {{1, 1}, {2, 2}, {3, 3}};
  const Holder a{0, Tier::active};
  Index<Tree> index;
  const Prompt circle = {x[1], x[0], x[2], x[1]};
  for (int round = 0; round < 200; ++round) {
    std::vector<Index<Tree>::Part> parts;
    for (int part = 0; part < 3; ++part) {
      parts.push_back({x[random() % 3], view(circle, random() % 4, 1)});
      parts.push_back({circle[random() % 4], view(circle)});
    }
    CHECK(index.load(a, parts) == Status::ok);
    CHECK(index.size().holdings == 3);
    CHECK(index.clear(0) == 3);
    CHECK(index.size().nodes == 0 && index.size().ghosts == 0);
  }
}
