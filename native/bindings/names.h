// Names of enumerations, spelled as in baton.transfer.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "transfer/types.h"

namespace baton::transfer {

inline const char* name_of(ReportKind kind) {
  switch (kind) {
    case ReportKind::pull_progress:
      return "pull_progress";
    case ReportKind::pull_done:
      return "pull_done";
    case ReportKind::pull_failed:
      return "pull_failed";
    case ReportKind::lease_asked:
      return "lease_asked";
    case ReportKind::lease_released:
      return "lease_released";
    case ReportKind::lease_ended:
      return "lease_ended";
  }
  return "";
}

inline const char* name_of(Cause cause) {
  constexpr const char* kNames[kCauses] = {"none",    "cancelled", "deadline", "unreachable", "refused", "revoked",
                                           "expired", "checksum",  "stalled",  "layout",      "model"};
  return kNames[static_cast<std::uint8_t>(cause)];
}

inline Corruption corruption_of(std::string_view name) {
  constexpr std::string_view kNames[kCorruptions] = {"none", "flip", "zero", "shift"};
  for (std::uint8_t i = 0; i < kCorruptions; ++i) {
    if (kNames[i] == name) return static_cast<Corruption>(i);
  }
  throw std::invalid_argument("a corruption is none, flip, zero or shift, not '" + std::string(name) + "'");
}

}  // namespace baton::transfer
