// An index for several threads: changes run in batches, and a match waits for one batch at most.
//
//   writer    ─ room ─▓ 64 blocks ▓─ room ─▓ 64 blocks ▓─ room ─▓ rest ▓─        one writer at a time
//   readers   ────── match ───┘ waits └▶ match ──────────── match ────────
//
// Slow work runs between two batches, beside the readers: growing the table, fetching memory, finding a worker's
// blocks. So a match may see the front of a run that is being stored, as if the rest came later.
#pragma once

#include <algorithm>
#include <mutex>
#include <optional>
#include <vector>

#include "radix/batch_lock.h"
#include "radix/holdings.h"
#include "radix/leading.h"
#include "radix/types.h"

namespace baton::radix {

enum class Status { ok, unknown_parent, full };

// `Core` is Tree, or the baseline of tests and benchmarks.
template <class Core>
class Index {
 public:
  explicit Index(bool counts_copies = false) : core_(counts_copies) {}

  // Stores a run behind a block that the worker holds; `fresh` is the number of blocks that are new to the holder.
  Status store(Holder holder, const std::optional<Id>& parent, Ids ids, std::size_t& fresh) {
    const std::lock_guard writer(writer_);
    fresh = 0;
    if (parent && !core_.holds(holder.worker, *parent)) return Status::unknown_parent;
    if (!core_.has_room(ids.size() + 1)) return Status::full;
    fresh = insert(holder, parent, ids);
    return Status::ok;
  }

  // Returns the number of the blocks that the holder held.
  std::size_t remove(Holder holder, Ids ids) {
    const std::lock_guard writer(writer_);
    std::size_t held = 0;
    for (std::size_t at = 0; at < ids.size(); at += kBatchBlocks) {
      const Ids some = ids.subspan(at, std::min(kBatchBlocks, ids.size() - at));
      core_.prefetch(some);
      batch([&] { held += core_.erase(holder, some); });
    }
    sweep();
    return held;
  }

  // Returns the number of blocks that the worker held, over all tiers.
  std::size_t clear(std::uint32_t worker) {
    const std::lock_guard writer(writer_);
    const std::size_t held = core_.holdings().blocks(worker);
    for (const Tier tier : kAllTiers) clear({worker, tier});
    return held;
  }

  // Replaces the holder's blocks by `runs`, which may hang behind blocks without holders.
  struct Part {
    std::optional<Id> parent;
    Ids ids;
  };
  Status load(Holder holder, const std::vector<Part>& parts) {
    const std::lock_guard writer(writer_);
    std::size_t blocks = 0;
    for (const Part& part : parts) blocks += part.ids.size() + 1;
    if (!core_.has_room(blocks)) return Status::full;
    clear(holder);
    for (const Part& part : parts) {
      if (!part.ids.empty()) insert(holder, part.parent, part.ids);
    }
    return Status::ok;
  }

  // Adds the result of `dump_behind`; returns the number of blocks that were new to their holders.
  struct Shared {
    Part part;
    std::vector<Holder> holders;
  };
  Status add(const std::vector<Shared>& branches, std::size_t& fresh) {
    const std::lock_guard writer(writer_);
    std::size_t blocks = 0;
    for (const Shared& branch : branches) blocks += branch.part.ids.size() + 1;
    fresh = 0;
    if (!core_.has_room(blocks)) return Status::full;
    for (const Shared& branch : branches) {
      if (branch.part.ids.empty()) continue;
      for (const Holder holder : branch.holders) fresh += insert(holder, branch.part.parent, branch.part.ids);
    }
    return Status::ok;
  }

  // Waits for one batch at most. If the wait takes too long, or at once if the match itself `is_long`, the rest runs
  // inside `aside`, which may release the caller's locks meanwhile.
  template <class Aside>
  void match(Ids ids, Leading& leading, std::vector<Held>& out, bool is_long, Aside aside) {
    out.clear();
    const std::uint32_t writer = batches_.enter_shared();
    const auto rest = [&] {
      batches_.wait_shared(writer);
      const Reader reader{batches_};
      core_.match(ids, leading, out);
    };
    if (is_long || !batches_.spin_shared(writer)) {
      aside(rest);
    } else {
      rest();
    }
  }
  void match(Ids ids, Leading& leading, std::vector<Held>& out) {
    match(ids, leading, out, false, [](auto rest) { rest(); });
  }

  // These run beside matches and wait for a writer's whole call.
  std::vector<Run> dump(Holder holder) {
    return alone([&] { return core_.dump(holder); });
  }
  std::vector<Branch> dump_behind(const Id& id) {
    return alone([&] { return core_.dump_behind(id); });
  }
  std::vector<Id> unheld(Ids ids) {
    return alone([&] { return core_.unheld(ids); });
  }
  std::vector<Id> idle(std::uint32_t ticks, std::size_t blocks_max) {
    return alone([&] { return core_.idle(ticks, blocks_max); });
  }
  std::uint32_t age_of(std::size_t blocks) {
    return alone([&] { return core_.age_of(blocks); });
  }
  Survey survey(std::size_t top) {
    return alone([&] { return core_.survey(top); });
  }
  Size size() {
    return alone([&] { return core_.size(); });
  }
  std::size_t holdings(std::uint32_t worker) {
    return alone([&] { return core_.holdings().blocks(worker); });
  }
  Sum sum(Holder holder) {
    return alone([&] { return core_.holdings().of(holder); });
  }
  void tick() { core_.tick(); }

 private:
  struct Reader {
    BatchLock& batches;
    ~Reader() { batches.unlock_shared(); }
  };

  template <class Question>
  auto alone(Question question) {
    const std::lock_guard writer(writer_);
    return question();
  }

  template <class Change>
  void batch(Change change) {
    core_.prepare();
    const std::lock_guard readers_out(batches_);
    core_.install();
    change();
  }

  std::size_t insert(Holder holder, const std::optional<Id>& parent, Ids ids) {
    std::size_t fresh = 0;
    Place place = kNowhere;
    for (std::size_t at = 0; at < ids.size(); at += kBatchBlocks) {
      const Ids some = ids.subspan(at, std::min(kBatchBlocks, ids.size() - at));
      core_.prefetch(some);
      batch([&] {
        if (at == 0) place = core_.place_of(parent);
        fresh += core_.insert(holder, place, some);
      });
    }
    sweep();
    return fresh;
  }

  void clear(Holder holder) {
    SetNumber set = core_.next_set(holder, kNoHolders + 1);
    while (set != kNoHolders) {
      bool is_done = false;
      batch([&] { is_done = core_.clear_some(holder, set); });
      if (is_done) set = core_.next_set(holder, set + 1);
    }
    sweep();
  }

  void sweep() {
    bool more = core_.has_unheld();
    while (more) batch([&] { more = core_.sweep(); });
  }

  std::mutex writer_;
  BatchLock batches_;
  Core core_;
};

}  // namespace baton::radix
