// How a connection's chunks travel: one interface, a backend behind each implementation.
//
// All calls come from the agent's progress thread and return without waiting. What an implementation completes, at once
// or later, it appends to the events it was made with. A one-sided backend reads in `place` and has nothing to serve.
#pragma once

#include "transfer/events.h"

namespace baton::transfer {

class DataPath {
 public:
  DataPath() = default;
  DataPath(const DataPath&) = delete;
  DataPath& operator=(const DataPath&) = delete;
  virtual ~DataPath() = default;

  // Source: read the chunk's blocks and send them; ends in `Served`.
  virtual void serve(const Serve& chunk) = 0;
  // Source: forget chunks of a pull whose reading has not begun.
  virtual void stop_serving(PullId pull) = 0;
  // Source: a slot is empty again. False: the peer broke the protocol, as below.
  [[nodiscard]] virtual bool credit(std::int32_t slot) = 0;
  // Sink: write the chunk into its blocks; ends in `Placed`.
  [[nodiscard]] virtual bool place(const Place& chunk) = 0;
  // Sink: after this returns nothing of a pull's earlier `place` writes any more.
  virtual void stop_placing(PullId pull) = 0;
};

}  // namespace baton::transfer
