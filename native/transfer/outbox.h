// The output of the core's parts: actions, and the time of the next tick.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "transfer/events.h"
#include "transfer/wire.h"

namespace baton::transfer {

class Outbox {
 public:
  template <class Frame>
  void send(ConnectionId connection, Frame frame) {
    actions_.push_back(Send{connection, encode(std::move(frame))});
  }
  void put(Action action) { actions_.push_back(std::move(action)); }
  [[nodiscard]] std::vector<Action> take() { return std::exchange(actions_, {}); }

  // Asks for a tick at `when_s` or before. Parts look at all their deadlines in each tick, so one number is enough.
  void wake_at(double when_s) { wake_s_ = std::min(wake_s_, when_s); }
  void sleep() { wake_s_ = std::numeric_limits<double>::infinity(); }
  [[nodiscard]] double wake_s() const { return wake_s_; }

 private:
  std::vector<Action> actions_;
  double wake_s_ = std::numeric_limits<double>::infinity();
};

}  // namespace baton::transfer
