#include <algorithm>
#include <iterator>
#include <random>
#include <utility>

#include "tests/check.h"
#include "transfer/core.h"
#include "transfer/cuda_pool.h"
#include "transfer/endpoint.h"
#include "transfer/wire.h"

using namespace baton::transfer;

namespace {

baton::Bytes body_of(const Blob& frame) {
  return baton::Bytes(frame).subspan(kLengthBytes + 1);
}

}  // namespace

TEST(frames_survive_the_wire) {
  const frames::Request sent{
      .pull = 1ull << 40, .generation = 3, .sequence = 0xFFFFFFFF, .layer = 7, .first_block = 9, .blocks = 1};
  const auto got = decode<frames::Request>(body_of(encode(sent)));
  CHECK(got && got->pull == sent.pull && got->sequence == sent.sequence && got->blocks == 1);
  const frames::Ended ended{.pull = 5, .cause = Cause::stalled, .detail = "why"};
  const auto got_ended = decode<frames::Ended>(body_of(encode(ended)));
  CHECK(got_ended && got_ended->cause == Cause::stalled && got_ended->detail == "why");
}

// The handles or keys of many layers, and a grant of as many blocks as a chunk may have, on a GPU.
TEST(offers_and_grants_arrive_whole) {
  frames::Offer offer{.backend = "cuda-ipc", .offer = Blob(kBlobBytesMax)};
  offer.offer.back() = 7;
  const Blob frame = encode(offer);
  CHECK(frame.size() <= kFrameBytesMax + kLengthBytes);
  const auto got = decode<frames::Offer>(body_of(frame));
  CHECK(got && got->offer == offer.offer);
  const frames::Grant grant{.where = Blob(Limits{}.chunk_blocks * sizeof(std::uint32_t) + CudaGrant::kBytes)};
  const auto got_grant = decode<frames::Grant>(body_of(encode(grant)));
  CHECK(got_grant && got_grant->where == grant.where);
}

TEST(short_long_and_impossible_frames_are_refused) {
  const Blob frame = encode(frames::Ended{.pull = 5, .cause = Cause::stalled, .detail = "why"});
  const baton::Bytes body = body_of(frame);
  for (std::size_t size = 0; size < body.size(); ++size) CHECK(!decode<frames::Ended>(body.first(size)));
  Blob longer(body.begin(), body.end());
  longer.push_back(0);
  CHECK(!decode<frames::Ended>(longer));
  Blob unknown_cause(body.begin(), body.end());
  unknown_cause[8] = kCauses;
  CHECK(!decode<frames::Ended>(unknown_cause));
}

TEST(endpoints_are_parsed_strictly) {
  const auto good = parse_endpoint(format_endpoint({{{"127.0.0.1:80"}}, 0xABC}));
  CHECK(good && good->rails.at(0).address == "127.0.0.1:80" && good->incarnation == 0xABC);
  const std::string several = "h:1@mlx5_0,[::1]:2~3,g:4@b~5/0000000000000001";
  const auto rails = parse_endpoint(several);
  CHECK(rails && rails->rails.size() == 3 && format_endpoint(*rails) == several);
  CHECK(rails && rails->rails[0].label == "mlx5_0" && rails->rails[1].distance == 3 && rails->rails[2].label == "b");
  std::string too_many = "h:1";
  for (std::size_t more = 0; more < kRailsMax; ++more) too_many += ",h:1";
  CHECK(!parse_endpoint(too_many + "/0000000000000001"));
  CHECK(parse_rail("h:0", true) && !parse_rail("h:0", false));
  CHECK(parse_endpoint("[::1]:80/0000000000000001"));
  for (const char* bad :
       {"", "/", ":1/0000000000000001", "h:0/0000000000000001", "h:99999/0000000000000001", "h:1/1",
        "h:1/000000000000000g", "h:1,/0000000000000001", "h:1@/0000000000000001", "h:1@a b/0000000000000001",
        "h:1~256/0000000000000001", "h:1~/0000000000000001", "h:1~2@a/0000000000000001", "h/0000000000000001", "h:1"}) {
    CHECK(!parse_endpoint(bad));
  }
}

// Frames of an unauthenticated peer, in any order, cause no read out of bounds and no action that serves a block.
TEST(a_core_survives_random_frames) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    Core core(Options{.secret = "s", .incarnation = 1});
    core.set_geometry({"model", 2, 8, 64, 16});
    const Key key{};
    std::vector<Event> setup = {OpenLease{key}};
    CHECK(core.step(0, setup).empty());
    setup = {ExtendLease{key, 1, {0, 1}}};
    CHECK(core.step(0, setup).empty());
    setup = {PostReady{key, 1, -1, 32}};
    CHECK(core.step(0, setup).empty());
    std::vector<Event> events = {Accepted{1}};
    for (int i = 0; i < 20; ++i) {
      FrameArrived frame{1, Blob(random() % 40)};
      for (auto& byte : frame.frame) byte = static_cast<std::uint8_t>(random());
      if (!frame.frame.empty()) frame.frame[0] = static_cast<std::uint8_t>(random() % 24);
      if (i == 0 && round % 2 == 0) {
        const Blob hello = encode(frames::Hello{});
        frame.frame.assign(hello.begin() + kLengthBytes, hello.end());
      }
      events.push_back(frame);
    }
    events.push_back(DataArrived{1, 1, 0, 64});
    events.push_back(BackendChecked{1, true});
    events.push_back(Closed{1, ""});
    for (const Action& action : core.step(0, events)) CHECK(!std::holds_alternative<Serve>(action));
    CHECK(core.stats().leases == 1);
  }
}

// Packets that are lost without a word, for a while: the kernel's own attempts grow as rare as that while was long.
TEST(a_source_that_does_not_answer_is_tried_anew) {
  Core sink(Options{.secret = "s", .incarnation = 1});
  sink.set_geometry({"model", 2, 8, 64, 16});
  std::vector<double> tried_s;
  std::vector<Event> events;
  for (std::uint8_t pulls = 0; pulls < 60; ++pulls) {
    const double now_s = 0.5 * pulls;
    const std::vector<Event> pull = {StartPull{{pulls}, "h:1/0000000000000001", 0, 16, {1}, 20}};
    std::vector<Action> actions = sink.step(now_s, pull);
    std::ranges::move(sink.step(now_s, std::exchange(events, {})), std::back_inserter(actions));
    for (const Action& action : actions) {
      if (std::holds_alternative<Connect>(action)) tried_s.push_back(now_s);
      if (const auto* close = std::get_if<Close>(&action)) events.push_back(Closed{close->connection, close->detail});
      if (const auto* stop = std::get_if<StopPlacing>(&action)) events.push_back(PlacingStopped{stop->pull});
    }
  }
  CHECK(tried_s.size() == 3 && tried_s[1] < 12);
}
