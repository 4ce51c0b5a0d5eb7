// Two agents' cores that know the same secret and have shaken hands, to be lied to from here on.
#pragma once

#include <string>

#include "fuzz/input.h"
#include "transfer/core.h"

namespace baton::fuzz {

inline constexpr std::uint32_t kMeetingLayers = 2;

inline Options meeting_options(const std::string& backend, std::uint8_t number) {
  Options options;
  options.secret = "shared";
  options.backends = {backend};
  options.incarnation = number;
  options.entropy[0] = number;
  return options;
}

struct Meeting {
  explicit Meeting(const std::string& backend)
      : source(meeting_options(backend, 1)), sink(meeting_options(backend, 2)) {
    for (Core* core : {&source, &sink}) core->set_geometry({"model", kMeetingLayers, 16, 64, 4});
    // Any pull does: it brings the connection up, and ends.
    carry(sink, StartPull{Key{99}, endpoint, 0, 4, {15}, 30});
    carry(source, Accepted{at_source});
    carry(sink, Connected{at_sink});
    carry(sink, CancelPull{Key{99}});
    require(source.stats().connections == 1 && sink.stats().connections == 1 && sink.stats().pulls == 0);
  }

  static constexpr ConnectionId at_source = 1, at_sink = 2;
  const std::string endpoint = "10.0.0.1:80/0000000000000001";
  Core source;
  Core sink;

 private:
  void carry(Core& core, const Event& event) {
    const bool is_source = &core == &source;
    for (const Action& action : core.step(0, {&event, 1})) {
      if (const auto* send = std::get_if<Send>(&action)) {
        carry(is_source ? sink : source, FrameArrived{is_source ? at_sink : at_source,
                                                      Blob(send->frame.begin() + kLengthBytes, send->frame.end())});
      } else if (std::holds_alternative<OfferBackend>(action)) {
        carry(core, BackendOffered{at_source, true, {}, {}});
      } else if (std::holds_alternative<AcceptBackend>(action)) {
        carry(core, BackendAccepted{at_sink, true, {}, {}});
      } else if (std::holds_alternative<CheckBackend>(action)) {
        carry(core, BackendChecked{at_source, true});
      } else if (const auto* stop = std::get_if<StopPlacing>(&action)) {
        carry(core, PlacingStopped{stop->pull});
      }
    }
  }
};

}  // namespace baton::fuzz
