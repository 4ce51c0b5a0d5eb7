// The Python binding of an index, tree or baseline: workers by name, ids as bytes, one call per batch.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>

#include "bindings/roster.h"
#include "radix/index.h"

namespace baton::bindings {

using namespace nb::literals;
using namespace baton::radix;

struct MalformedRun : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct UnknownBlock : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr std::size_t kRunBlocksMax = std::size_t{1} << 20;
// A match over at most this many blocks, and the wait for a batch, cost less than releasing and reacquiring the GIL, so
// they keep it: no batch needs it to end. Longer calls release it.
constexpr std::size_t kShortMatchBlocks = 4096;

inline Ids ids_in(const nb::bytes& blocks) {
  if (blocks.size() % kIdBytes != 0) {
    throw MalformedRun(std::to_string(blocks.size()) + " bytes are no whole number of block ids of 16 bytes");
  }
  if (blocks.size() / kIdBytes > kRunBlocksMax) {
    throw MalformedRun("a run of " + std::to_string(blocks.size() / kIdBytes) + " blocks is longer than " +
                       std::to_string(kRunBlocksMax));
  }
  return {blocks.data(), blocks.size() / kIdBytes};
}

inline std::optional<Id> parent_in(const nb::bytes& parent) {
  if (parent.size() == 0) return std::nullopt;
  if (parent.size() != kIdBytes) {
    throw MalformedRun("a parent of " + std::to_string(parent.size()) + " bytes is no block id");
  }
  return Ids(parent.data(), 1)[0];
}

inline Tier tier_of(std::uint32_t tier) {
  if (tier >= kTiers) throw std::out_of_range("there is no tier " + std::to_string(tier));
  return kAllTiers[tier];
}

inline nb::bytes to_bytes(const std::optional<Id>& id) {
  return id ? nb::bytes(&*id, kIdBytes) : nb::bytes("", 0);
}

inline nb::bytes to_bytes(const std::vector<Id>& ids) {
  return nb::bytes(ids.data(), ids.size() * kIdBytes);
}

template <class Core>
class NamedIndex {
 public:
  using Part = typename Index<Core>::Part;
  using BytesRun = std::pair<nb::bytes, nb::bytes>;
  using Names = std::array<std::vector<nb::str>, kTiers>;
  using BytesBranch = std::tuple<nb::bytes, nb::bytes, Names>;

  explicit NamedIndex(bool counts_copies) : index_(counts_copies) {}

  std::size_t store(const nb::str& name, std::uint32_t tier, const nb::bytes& parent, const nb::bytes& blocks) {
    const std::optional<Id> behind = parent_in(parent);
    const Ids ids = ids_in(blocks);
    Call call(*this, name);
    std::size_t fresh = 0;
    Status status;
    {
      nb::gil_scoped_release release;
      status = index_.store({call.worker, tier_of(tier)}, behind, ids, fresh);
    }
    check(status);
    call.may_hold_nothing = ids.empty();
    return fresh;
  }

  std::size_t remove(const nb::str& name, std::uint32_t tier, const nb::bytes& blocks) {
    const Ids ids = ids_in(blocks);
    if (roster_.find(name) == kNone) return 0;
    const Call call(*this, name);
    nb::gil_scoped_release release;
    return index_.remove({call.worker, tier_of(tier)}, ids);
  }

  std::size_t clear(const nb::str& name) {
    if (roster_.find(name) == kNone) return 0;
    const Call call(*this, name);
    nb::gil_scoped_release release;
    return index_.clear(call.worker);
  }

  void load(const nb::str& name, std::uint32_t tier, const std::vector<BytesRun>& runs) {
    std::vector<Part> parts;
    parts.reserve(runs.size());
    for (const auto& [parent, blocks] : runs) parts.push_back({parent_in(parent), ids_in(blocks)});
    const Call call(*this, name);
    Status status;
    {
      nb::gil_scoped_release release;
      status = index_.load({call.worker, tier_of(tier)}, parts);
    }
    check(status);
  }

  std::vector<BytesRun> dump(const nb::str& name, std::uint32_t tier) {
    std::vector<Run> runs;
    if (roster_.find(name) != kNone) {
      const Call call(*this, name);
      nb::gil_scoped_release release;
      runs = index_.dump({call.worker, tier_of(tier)});
    }
    std::vector<BytesRun> out;
    out.reserve(runs.size());
    for (const Run& run : runs) out.emplace_back(to_bytes(run.parent), to_bytes(run.blocks));
    return out;
  }

  // Returns the sum of the holder's ids, as an id, and their number.
  std::pair<nb::bytes, std::size_t> sum(const nb::str& name, std::uint32_t tier) {
    Sum sum;
    if (roster_.find(name) != kNone) {
      const Call call(*this, name);
      nb::gil_scoped_release release;
      sum = index_.sum({call.worker, tier_of(tier)});
    }
    return {to_bytes(Id{static_cast<std::uint64_t>(sum.ids), static_cast<std::uint64_t>(sum.ids >> 64)}), sum.blocks};
  }

  // `entry` converts a worker's result into a dictionary value, or null to leave the worker out.
  template <class Entry>
  nb::dict match(const nb::bytes& blocks, Entry entry) {
    const Ids ids = ids_in(blocks);
    Scratch& scratch = scratch_of_thread();
    std::uint64_t forgotten;
    do {
      forgotten = roster_.forgotten();
      index_.match(ids, scratch.leading, scratch.held, ids.size() > kShortMatchBlocks, [](auto rest) {
        nb::gil_scoped_release release;
        rest();
      });
    } while (forgotten != roster_.forgotten());
    nb::dict out;
    for (const Held& held : scratch.held) {
      const nb::object value = entry(held);
      if (value.is_valid() && PyDict_SetItem(out.ptr(), roster_.name(held.worker).ptr(), value.ptr()) != 0) {
        throw nb::python_error();
      }
    }
    return out;
  }

  std::vector<BytesBranch> dump_behind(const nb::bytes& block) {
    const std::optional<Id> id = parent_in(block);
    if (!id) throw MalformedRun("an empty id is no block");
    std::vector<Branch> branches;
    std::uint64_t forgotten;
    do {
      forgotten = roster_.forgotten();
      nb::gil_scoped_release release;
      branches = index_.dump_behind(*id);
    } while (forgotten != roster_.forgotten());
    std::vector<BytesBranch> out;
    for (const Branch& branch : branches) {
      Names names;
      for (const Holder holder : branch.holders) {
        names[static_cast<std::size_t>(holder.tier)].push_back(nb::borrow<nb::str>(roster_.name(holder.worker)));
      }
      out.emplace_back(to_bytes(branch.run.parent), to_bytes(branch.run.blocks), std::move(names));
    }
    return out;
  }

  std::size_t add(const std::vector<BytesBranch>& branches) {
    std::vector<typename Index<Core>::Shared> shared;
    for (const auto& [parent, blocks, names] : branches) {
      shared.push_back({{parent_in(parent), ids_in(blocks)}, {}});
    }
    std::vector<std::unique_ptr<Call>> calls;
    for (std::size_t at = 0; at < branches.size(); ++at) {
      const auto enter = [&](const std::vector<nb::str>& names, Tier tier) {
        for (const nb::str& name : names) {
          calls.push_back(std::make_unique<Call>(*this, name));
          shared[at].holders.push_back({calls.back()->worker, tier});
        }
      };
      for (const Tier tier : kAllTiers) enter(std::get<2>(branches[at])[static_cast<std::size_t>(tier)], tier);
    }
    std::size_t fresh = 0;
    Status status;
    {
      nb::gil_scoped_release release;
      status = index_.add(shared, fresh);
    }
    check(status);
    return fresh;
  }

  nb::bytes unheld(const nb::bytes& blocks) {
    const Ids ids = ids_in(blocks);
    std::vector<Id> out;
    {
      nb::gil_scoped_release release;
      out = index_.unheld(ids);
    }
    return to_bytes(out);
  }

  nb::bytes idle(std::uint32_t ticks, std::size_t blocks_max) {
    std::vector<Id> ids;
    {
      nb::gil_scoped_release release;
      ids = index_.idle(ticks, blocks_max);
    }
    return to_bytes(ids);
  }

  std::uint32_t age_of(std::size_t blocks) {
    nb::gil_scoped_release release;
    return index_.age_of(blocks);
  }

  // Returns the depth, and (last id, blocks, workers) of each of the `top` prefixes.
  std::pair<std::size_t, std::vector<std::tuple<nb::bytes, std::size_t, std::size_t>>> survey(std::size_t top) {
    Survey survey;
    {
      nb::gil_scoped_release release;
      survey = index_.survey(top);
    }
    std::vector<std::tuple<nb::bytes, std::size_t, std::size_t>> rows;
    for (const Prefix& prefix : survey.top) rows.emplace_back(to_bytes(prefix.last), prefix.blocks, prefix.workers);
    return {survey.depth, std::move(rows)};
  }

  Size size() {
    nb::gil_scoped_release release;
    return index_.size();
  }

  void tick() { index_.tick(); }
  std::size_t workers() const { return roster_.size(); }

 private:
  struct Scratch {
    Leading leading;
    std::vector<Held> held;
  };

  // A worker's number, which is not reassigned while the GIL is released.
  struct Call {
    Call(NamedIndex& index, const nb::str& name) : worker(index.roster_.enter(name)), index_(index) {}
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call() {
      index_.roster_.leave(worker, may_hold_nothing, [&] {
        nb::gil_scoped_release release;
        return index_.index_.holdings(worker) == 0;
      });
    }
    const std::uint32_t worker;
    bool may_hold_nothing = true;

   private:
    NamedIndex& index_;
  };

  static Scratch& scratch_of_thread() {
    thread_local Scratch scratch;
    return scratch;
  }

  static void check(Status status) {
    if (status == Status::unknown_parent) throw UnknownBlock("the worker does not hold the parent here");
    if (status == Status::full) throw IndexFull("the index has no room for so many blocks");
  }

  Roster roster_;
  Index<Core> index_;
};

inline nb::object leading_blocks(std::uint32_t blocks) {
  return blocks == 0 ? nb::object() : nb::steal(PyLong_FromUnsignedLong(blocks));
}

template <class Core>
nb::class_<NamedIndex<Core>> bind_index(nb::module_& m, const char* name) {
  using This = NamedIndex<Core>;
  return nb::class_<This>(m, name)
      .def(nb::init<bool>(), "counts_copies"_a = false)
      .def("store", &This::store, "worker"_a, "tier"_a, "parent"_a, "blocks"_a)
      .def("remove", &This::remove, "worker"_a, "tier"_a, "blocks"_a)
      .def("clear", &This::clear, "worker"_a)
      .def("load", &This::load, "worker"_a, "tier"_a, "runs"_a)
      .def("dump", &This::dump, "worker"_a, "tier"_a)
      .def("sum", &This::sum, "worker"_a, "tier"_a)
      .def(
          "match",
          [](This& self, const nb::bytes& blocks, std::uint32_t tier) {
            return self.match(blocks, [&](const Held& held) {
              return leading_blocks(held.reach[static_cast<std::size_t>(tier_of(tier))]);
            });
          },
          "blocks"_a, "tier"_a)
      .def(
          "match_tiers",
          [](This& self, const nb::bytes& blocks) {
            return self.match(blocks, [](const Held& held) -> nb::object {
              return nb::make_tuple(held.reach[0], held.reach[1], held.reach[2]);
            });
          },
          "blocks"_a)
      .def("size", &This::size)
      .def_prop_ro("workers", &This::workers);
}

inline void bind_size(nb::module_& m, const char* name) {
  nb::class_<Size>(m, name)
      .def_ro("blocks", &Size::blocks)
      .def_ro("holdings", &Size::holdings)
      .def_ro("ghosts", &Size::ghosts)
      .def_ro("nodes", &Size::nodes)
      .def_ro("sets", &Size::sets)
      .def_ro("bytes", &Size::bytes);
}

}  // namespace baton::bindings
