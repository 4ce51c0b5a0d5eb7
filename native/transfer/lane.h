// One of a sink's connections to a source. Several share the chunks of its pulls where that is faster: one for each
// stream of each rail.
#pragma once

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "transfer/staging.h"
#include "transfer/types.h"

namespace baton::transfer {

struct Lane {
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static constexpr double kMeasureS = 10e-3;  // Busy time for one measurement.
  static constexpr double kNewest = 0.2;      // Share of the newest measurement.
  static constexpr double kHoldsS = 1;        // A measurement is valid for this long after the lane's last request.

  ConnectionId connection = 0;
  std::size_t rail = 0;  // Index of the source's rail.
  bool agreed = false;   // The handshake is complete.
  bool closing = false;  // Given up; `Closed` is awaited.
  std::string backend;
  std::string declined;
  bool fallback = false;
  bool checksum = true;
  std::optional<Staging> staging;  // Present if the source's blocks differ from this side's.
  std::uint32_t in_flight = 0;     // Chunks, over all pulls.
  std::uint64_t in_flight_bytes = 0;
  std::uint64_t asked_bytes = 0;
  double bytes_per_s = 0;  // 0: not measured yet.
  double busy_from_s = 0;
  double busy_s = 0;  // Busy time since the last measurement, as are the bytes.
  std::uint64_t busy_bytes = 0;
  double asked_s = 0;            // Instant of the last request of a chunk.
  double heard_s = 0;            // Instant at which the source last sent something, or the connection was started.
  double owed_since_s = kNever;  // Instant since which an answer is due.
  double suspected_s = kNever;   // Instant since which the lane seems to hang.

  [[nodiscard]] bool ready() const { return agreed && !closing; }
  // 0: unknown. A lane that is unused because it was slow is tried again after a while: it may have recovered.
  [[nodiscard]] double speed(double now_s) const {
    return in_flight > 0 || now_s < asked_s + kHoldsS ? bytes_per_s : 0;
  }
  void expect_answer(double now_s) { owed_since_s = std::min(owed_since_s, now_s); }
  void hear(double now_s) {
    heard_s = now_s;
    owed_since_s = in_flight > 0 ? now_s : kNever;
    suspected_s = kNever;
  }
  void ask_for(double now_s, std::uint64_t bytes) {
    if (in_flight++ == 0) busy_from_s = now_s;
    in_flight_bytes += bytes;
    asked_bytes += bytes;
    asked_s = now_s;
    expect_answer(now_s);
  }
  // Stops waiting for a chunk.
  void let_go(std::uint64_t bytes) {
    in_flight_bytes -= bytes;
    if (--in_flight == 0) owed_since_s = kNever;
  }
  void finish(double now_s, std::uint64_t bytes) {
    let_go(bytes);
    busy_s += now_s - std::exchange(busy_from_s, now_s);
    busy_bytes += bytes;
    if (busy_s < kMeasureS) return;
    const double sample = static_cast<double>(std::exchange(busy_bytes, 0)) / std::exchange(busy_s, 0);
    bytes_per_s = bytes_per_s == 0 ? sample : bytes_per_s + kNewest * (sample - bytes_per_s);
  }
};

}  // namespace baton::transfer
