// Pulls from a source whose blocks are not the sink's, decided step by step: what is staged, when it is converted, and
// when it counts.
#include <algorithm>
#include <deque>

#include "tests/check.h"
#include "transfer/converter.h"
#include "transfer/core.h"
#include "transfer/staging.h"

using namespace baton::transfer;
namespace layout = baton::layout;

namespace {

constexpr ConnectionId kAtSource = 1, kAtSink = 2;
constexpr std::uint32_t kSlots = 2, kTokens = 40, kFirst = 8;  // Blocks of 16 tokens, and of 8.
const std::string kEndpoint = "10.0.0.1:80/0000000000000001";

layout::Layout layout_of(std::uint32_t block_tokens, layout::Form form = layout::Form::split) {
  return {.layers = 2,
          .kv_heads = 1,
          .dim = 4,
          .dtype = layout::Dtype::bfloat16,
          .form = form,
          .block_tokens = block_tokens};
}

Geometry geometry_of(const layout::Layout& of) {
  return {.fingerprint = "model",
          .layers = of.layers,
          .blocks = 16,
          .block_bytes = layout::block_bytes(of),
          .block_tokens = of.block_tokens,
          .layout = of};
}

Options options_of(std::uint8_t number) {
  Options options;
  options.secret = "shared";
  options.backends = {"tcp"};
  options.incarnation = number;
  options.entropy[0] = number;
  options.limits.chunk_bytes = 1;  // A block each.
  options.limits.staging_bytes = 1;
  return options;
}

// Two cores; frames and payloads arrive at once, and conversions wait for the test.
struct Pair {
  Core source{options_of(1)};
  Core sink{options_of(2)};
  double now_s = 0;
  ConnectionId at_source = kAtSource, at_sink = kAtSink;
  std::deque<Convert> converting;
  std::vector<Report> reports;
  std::uint64_t generation = 0;
  bool staged = false;

  Pair() {
    source.set_geometry(geometry_of(layout_of(16)));
    sink.set_geometry(geometry_of(layout_of(8, layout::Form::fused)));
    lease();
    step(sink, StartPull{Key{1}, kEndpoint, kFirst, kTokens, {3, 1, 2, 7}, 30});
    CHECK(staged);
  }
  void lease() {
    step(source, OpenLease{Key{1}});
    generation = source.generation(Key{1});
    step(source, ExtendLease{Key{1}, generation, {5, 6, 4}});
    step(source, PostReady{Key{1}, generation, -1, kTokens});
  }
  void convert_one() {
    const Convert next = converting.front();
    converting.pop_front();
    step(sink, Converted{next.connection, next.pull, next.sequence});
  }
  [[nodiscard]] bool done() const {
    return std::any_of(reports.begin(), reports.end(),
                       [](const Report& report) { return report.kind == ReportKind::pull_done; });
  }
  void step(Core& core, const Event& event) {
    for (Action& action : core.step(now_s, {&event, 1})) carry_out(core, action);
  }
  void carry_out(Core& core, Action& action) {
    const bool is_source = &core == &source;
    if (const auto* send = std::get_if<Send>(&action)) {
      step(is_source ? sink : source,
           FrameArrived{is_source ? at_sink : at_source, Blob(send->frame.begin() + kLengthBytes, send->frame.end())});
    } else if (const auto* connect = std::get_if<Connect>(&action)) {
      at_sink = connect->connection;
      at_source += 2;
      step(source, Accepted{at_source});
      step(sink, Connected{at_sink});
    } else if (const auto* stage = std::get_if<Stage>(&action)) {
      staged = stage->source.block_tokens == 16;
    } else if (const auto* serve = std::get_if<Serve>(&action)) {
      const std::uint64_t bytes = serve->blocks.size() * source.geometry().block_bytes;
      step(sink, DataArrived{at_sink, serve->pull, serve->sequence, bytes});
      step(source, Served{at_source, serve->pull, serve->sequence});
    } else if (const auto* place = std::get_if<Place>(&action)) {
      for (const Convert& other : converting) CHECK(other.staged != place->blocks);
      CHECK(place->blocks.size() == 1 && place->blocks[0] < kSlots);
      step(sink, Placed{place->connection, place->pull, place->sequence});
    } else if (const auto* convert = std::get_if<Convert>(&action)) {
      converting.push_back(*convert);
      CHECK(converting.size() <= kSlots);
    } else if (const auto* stop = std::get_if<StopPlacing>(&action)) {
      std::erase_if(converting, [&](const Convert& chunk) { return chunk.pull == stop->pull; });
      step(sink, PlacingStopped{stop->pull});
    } else if (auto* report = std::get_if<Report>(&action); report != nullptr && !is_source) {
      reports.push_back(std::move(*report));
    }
  }
};

}  // namespace

TEST(staging_counts_what_is_converted) {
  Pair pair;
  std::vector<Convert> all;
  for (std::uint32_t chunks = 0; chunks < 12; ++chunks) {  // K and V of two layers, three blocks each.
    CHECK(!pair.done() && !pair.converting.empty());
    all.push_back(pair.converting.front());
    pair.convert_one();
    CHECK(pair.sink.stats().pulled_blocks == chunks + 1);
  }
  CHECK(pair.done() && pair.converting.empty() && pair.sink.stats().pulls == 0);
  // The first block of the source begins before the pull does, the last ends after it.
  const auto& first = all.front();
  CHECK(first.staged_origin == 0 && first.first_token == kFirst && first.tokens == 8 && first.origin == kFirst);
  CHECK(first.blocks == std::vector<std::uint32_t>({3}));
  CHECK(all[1].staged_origin == 16 && all[1].first_token == 16 && all[1].tokens == 16 && all[1].origin == 16);
  CHECK(all[1].blocks == std::vector<std::uint32_t>({1, 2}));
  CHECK(all[2].first_token == 32 && all[2].tokens == 8 && all[2].blocks == std::vector<std::uint32_t>({7}));
  CHECK(pair.reports.size() == 3 && pair.reports[0].layers == 1 && pair.reports[1].layers == 2);
}

TEST(staging_ends_with_the_pull) {
  Pair pair;
  pair.convert_one();
  const Convert late = pair.converting.front();
  pair.step(pair.sink, CancelPull{Key{1}});
  CHECK(pair.converting.empty() && pair.reports.back().cause == Cause::cancelled);
  const std::uint64_t blocks = pair.sink.stats().pulled_blocks;
  pair.step(pair.sink, Converted{late.connection, late.pull, late.sequence});
  CHECK(pair.sink.stats().pulled_blocks == blocks && pair.sink.stats().pulls == 0);
}

TEST(staging_begins_again_with_a_new_generation) {
  Pair pair;
  pair.convert_one();
  const Convert old = pair.converting.front();
  pair.step(pair.source, RevokeLease{Key{1}, false});
  CHECK(pair.converting.empty());
  pair.lease();
  pair.step(pair.sink, Converted{old.connection, old.pull, old.sequence});  // The old generation must not count.
  for (std::uint32_t chunks = 0; chunks < 12; ++chunks) {
    CHECK(!pair.done());
    pair.convert_one();
  }
  CHECK(pair.done() && pair.reports.back().restarts == 1);
}

TEST(staging_of_a_lost_connection_is_asked_for_again) {
  Pair pair;
  pair.convert_one();
  pair.converting.clear();
  pair.step(pair.source, Closed{pair.at_source, "cut"});
  pair.step(pair.sink, Closed{pair.at_sink, "cut"});
  pair.now_s = 0.1;
  pair.step(pair.sink, SetFaults{});
  for (std::uint32_t chunks = 1; chunks < 12; ++chunks) {
    CHECK(!pair.done() && !pair.converting.empty());
    pair.convert_one();
  }
  CHECK(pair.done());
}

TEST(staging_writes_nothing_once_it_is_stopped) {
  const layout::Layout theirs = layout_of(16), ours = layout_of(8, layout::Form::fused);
  std::vector<std::uint8_t> memory(2 * 4 * layout::block_bytes(ours), 0xA5);
  const std::uint64_t layer_bytes = memory.size() / 2;
  const layout::Pool own(ours, {memory.data(), memory.data() + layer_bytes}, 4, layout::block_bytes(ours));
  Converter converter(geometry_of(theirs), options_of(2).limits, own);
  CHECK(converter.pool().layers.size() == 4 && converter.pool().blocks == kSlots);
  std::fill_n(converter.pool().layers[0], kSlots * layout::block_bytes(theirs), std::uint8_t{7});
  const auto chunk = [](PullId pull, std::uint32_t tensor) {
    return Convert{
        .pull = pull, .layer = tensor, .staged = {1}, .blocks = {2}, .origin = 8, .first_token = 8, .tokens = 3};
  };
  std::vector<Event> happened;
  converter.convert(chunk(1, 0));
  converter.convert(chunk(2, 3));
  converter.stop(1);
  CHECK(!converter.advance(happened) && happened.size() == 1 && std::get<Converted>(happened[0]).pull == 2);
  // Three tokens of layer 1's V, and nothing else.
  const auto written = std::count(memory.begin(), memory.end(), std::uint8_t{7});
  CHECK(written == 3 * 4 * 2 && std::count(memory.begin(), memory.begin() + layer_bytes, std::uint8_t{7}) == 0);
  CHECK(!converter.advance(happened) && happened.size() == 1);
}
