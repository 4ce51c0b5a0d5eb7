// The map between worker names in Python and worker numbers in the index.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "radix/types.h"

namespace baton::bindings {

namespace nb = nanobind;

struct IndexFull : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Used only with the GIL held.
class Roster {
 public:
  // Returns a worker's number, or `radix::kNone` for an unknown name.
  std::uint32_t find(const nb::str& name) const {
    PyObject* number = PyDict_GetItem(numbers_.ptr(), name.ptr());
    return number == nullptr ? radix::kNone : static_cast<std::uint32_t>(PyLong_AsUnsignedLong(number));
  }

  // Begins a call about a worker: its number is not reassigned until `leave`.
  std::uint32_t enter(const nb::str& name) {
    std::uint32_t number = find(name);
    if (number == radix::kNone) {
      if (free_.empty()) {
        if (entries_.size() == radix::kWorkersMax) {
          throw IndexFull("the index knows " + std::to_string(radix::kWorkersMax) + " workers and takes no more");
        }
        free_.push_back(static_cast<std::uint32_t>(entries_.size()));
        entries_.emplace_back();
      }
      number = free_.back();
      numbers_[name] = number;
      entries_[number].name = name;
      free_.pop_back();
    }
    ++entries_[number].calls;
    ++entries_[number].calls_ever;
    return number;
  }

  // Ends a call. `holds_nothing` releases the GIL while it looks; its result counts only if no other call about this
  // worker began meanwhile.
  template <class HoldsNothing>
  void leave(std::uint32_t number, bool may_hold_nothing, HoldsNothing holds_nothing) {
    bool is_empty = false;
    entries_[number].may_hold_nothing |= may_hold_nothing;
    while (entries_[number].calls == 1 && entries_[number].may_hold_nothing) {
      const std::uint64_t calls_ever = entries_[number].calls_ever;
      is_empty = holds_nothing();
      if (calls_ever == entries_[number].calls_ever) entries_[number].may_hold_nothing = false;
    }
    Entry& entry = entries_[number];
    if (--entry.calls > 0 || !is_empty) return;
    PyDict_DelItem(numbers_.ptr(), entry.name.ptr());
    entry.name = nb::object();
    free_.push_back(number);
    ++forgotten_;
  }

  const nb::object& name(std::uint32_t number) const { return entries_[number].name; }
  std::size_t size() const { return numbers_.size(); }
  // Incremented whenever a number may be reassigned to another worker.
  std::uint64_t forgotten() const { return forgotten_; }

 private:
  struct Entry {
    nb::object name;
    std::uint32_t calls = 0;
    bool may_hold_nothing = false;
    std::uint64_t calls_ever = 0;
  };
  nb::dict numbers_;
  std::vector<Entry> entries_;
  std::vector<std::uint32_t> free_;
  std::uint64_t forgotten_ = 0;
};

}  // namespace baton::bindings
