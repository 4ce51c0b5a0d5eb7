// The progress thread's side of staging: the memory, and the conversions from it into the pool.
#pragma once

#include <deque>
#include <memory>

#include "layout/convert.h"
#include "transfer/events.h"
#include "transfer/pool.h"

namespace baton::transfer {

class Converter {
 public:
  // `own` must outlive it. Throws std::bad_alloc.
  Converter(const Geometry& source, const Limits& limits, const layout::Pool& own);

  // The destination of chunks: blocks like the source's. Each chunk has a slot of its own, whatever its tensor, so all
  // tensors share one piece of memory.
  [[nodiscard]] const Pool& pool() const { return pool_; }
  [[nodiscard]] std::uint64_t chunk_bytes_max() const { return chunk_bytes_max_; }

  void convert(const Convert& chunk) { waiting_.push_back(chunk); }
  // Returns when nothing of the pull is written any more.
  void stop(PullId pull);
  // Converts one chunk; returns whether there are more.
  bool advance(std::vector<Event>& happened);

 private:
  std::uint64_t chunk_bytes_max_;
  std::unique_ptr<std::uint8_t[]> memory_;
  Pool pool_;
  layout::Pool staged_;
  const layout::Pool& own_;
  std::deque<Convert> waiting_;  // Bounded: at most one per slot.
};

}  // namespace baton::transfer
