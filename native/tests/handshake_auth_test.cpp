// The handshake against peers that do not know the secret, know it and lie, or repeat what others said. The world of
// tests/model is one of agents that have met; here it is about admission, and about cases that are too rare there.
#include "tests/check.h"
#include "tests/proof.h"
#include "transfer/core.h"

using namespace baton::transfer;
using baton::Digest;
using baton::tests::proof;

namespace {

constexpr ConnectionId kAtSource = 1, kAtSink = 2;
constexpr std::uint64_t kIncarnation = 7;

Options options_of(std::uint8_t number, std::vector<std::string> backends = {"tcp"}) {
  Options options;
  options.secret = "shared";
  options.backends = std::move(backends);
  options.incarnation = number;
  options.entropy[0] = number;
  options.limits.connections = 3;
  return options;
}

// One core, and the last frames it sent.
struct Met {
  Core core;
  std::vector<Blob> said;
  bool closed = false;
  bool used = false;  // Chunks may travel.

  explicit Met(const Options& options, std::optional<baton::layout::Layout> layout = {}) : core(options) {
    core.set_geometry({"model", 2, 8, 64, 4, layout});
  }
  void step(double now_s, const Event& event) {
    for (const Action& action : core.step(now_s, {&event, 1})) {
      if (const auto* send = std::get_if<Send>(&action)) {
        said.emplace_back(send->frame.begin() + kLengthBytes, send->frame.end());
      }
      closed = closed || std::holds_alternative<Close>(action);
      used = used || std::holds_alternative<UseBackend>(action);
    }
  }
  template <class Frame>
  void hear(ConnectionId connection, Frame frame) {
    Blob bytes = encode(std::move(frame));
    step(0, FrameArrived{connection, Blob(bytes.begin() + kLengthBytes, bytes.end())});
  }
  template <class Frame>
  Frame last() const {
    CHECK(!said.empty() && said.back()[0] == static_cast<std::uint8_t>(Frame::type));
    const auto frame = decode<Frame>(baton::Bytes(said.back()).subspan(1));
    CHECK(frame);
    return *frame;
  }
};

struct MetSource : Met {
  Digest nonce{};
  explicit MetSource(const Options& options = options_of(1), std::optional<baton::layout::Layout> layout = {})
      : Met(options, layout) {
    step(0, Accepted{kAtSource});
    hear(kAtSource, frames::Hello{.nonce = sink_nonce()});
    nonce = last<frames::Challenge>().nonce;
  }
  static Digest sink_nonce() { return {9, 9}; }
};

struct MetSink : Met {
  Digest nonce{};
  explicit MetSink(const Options& options = options_of(2)) : Met(options) {
    step(0, StartPull{Key{1}, "10.0.0.1:80/0000000000000007", 0, 4, {0}, 5});
    step(0, Connected{kAtSink});
    nonce = last<frames::Hello>().nonce;
    hear(kAtSink, frames::Challenge{.nonce = source_nonce()});
    (void)last<frames::Identify>();
  }
  static Digest source_nonce() { return {8, 8}; }
};

frames::Identity identity(std::uint64_t incarnation = kIncarnation) {
  return {.incarnation = incarnation,
          .fingerprint = "model",
          .layers = 2,
          .block_bytes = 64,
          .block_tokens = 4,
          .chunk_blocks = 1024,
          .backends = "tcp",
          .checksum = true,
          .lease_ttl_ms = 5000};
}

void welcome(MetSink& sink, const frames::Identity& who) {
  sink.hear(kAtSink, frames::Welcome{who, proof("source", sink.nonce, MetSink::source_nonce(), who)});
}

}  // namespace

TEST(a_handshake_refuses_sinks_without_proof) {
  const auto knock = [](const frames::Identity& claimed, const Digest& shown) {
    MetSource source;
    source.hear(kAtSource, frames::Identify{claimed, shown});
    CHECK(source.closed && !source.used && source.core.stats().connections == 0);
    (void)source.last<frames::Refuse>();
  };
  const Digest nonce = MetSource().nonce;
  knock(identity(), Digest{});
  knock(identity(), proof("sink", MetSource::sink_nonce(), nonce, identity(), "guessed"));
  knock(identity(), proof("source", MetSource::sink_nonce(), nonce, identity()));   // One's own proof, sent back.
  knock(identity(), proof("sink", MetSource::sink_nonce(), Digest{}, identity()));  // From another handshake.
  knock(identity(), proof("sink", Digest{}, nonce, identity()));                    // For another Hello.
  knock(identity(), proof("sink", MetSource::sink_nonce(), nonce, identity(8)));    // For another identity.
  frames::Identity other = identity();
  other.block_bytes = 128;
  knock(other, proof("sink", MetSource::sink_nonce(), nonce, other));
  other = identity();
  other.backends = "shm";
  knock(other, proof("sink", MetSource::sink_nonce(), nonce, other));
}

TEST(a_handshake_accepts_peers_with_proof) {
  MetSource source;
  source.hear(kAtSource,
              frames::Identify{identity(), proof("sink", MetSource::sink_nonce(), source.nonce, identity())});
  CHECK(!source.closed && source.used);
  const auto agreed = source.last<frames::Agreed>();
  CHECK(agreed.backend == "tcp" && agreed.checksum);

  MetSink sink;
  welcome(sink, identity());
  CHECK(!sink.closed && !sink.used);
  sink.hear(kAtSink, frames::Agreed{"tcp", true, ""});
  CHECK(!sink.closed && sink.used);
  (void)sink.last<frames::Ask>();
}

TEST(a_handshake_refuses_sources_without_proof) {
  const auto meet = [](const frames::Identity& claimed, const Digest& shown) {
    MetSink sink;
    sink.hear(kAtSink, frames::Welcome{claimed, shown});
    CHECK(sink.closed && !sink.used && sink.core.stats().connections == 0);
  };
  const Digest nonce = MetSink().nonce;
  meet(identity(), Digest{});
  meet(identity(), proof("source", nonce, MetSink::source_nonce(), identity(), "guessed"));
  meet(identity(), proof("sink", nonce, MetSink::source_nonce(), identity()));
  meet(identity(), proof("source", Digest{}, MetSink::source_nonce(), identity()));
  meet(identity(), proof("source", nonce, MetSink::source_nonce(), identity(9)));
  meet(identity(9),
       proof("source", nonce, MetSink::source_nonce(), identity(9)));  // Another incarnation of the source.
}

TEST(a_handshake_compares_layouts) {
  constexpr const char* kOwn =
      "layers=2 kv_heads=1 dim=4 dtype=bfloat16 order=NHD form=fused packing=plain block_tokens=4 tp=0/1";
  const auto meet = [&](const frames::Identity& who) {
    auto source = std::make_unique<MetSource>(options_of(1), baton::layout::parse(kOwn));
    source->hear(kAtSource, frames::Identify{who, proof("sink", MetSource::sink_nonce(), source->nonce, who)});
    return source;
  };
  const auto with = [](const std::string& text) {
    frames::Identity who = identity();
    who.layout = text;
    return who;
  };
  const auto changed = [&](const std::string& from, const std::string& to) {
    const std::string own = kOwn;
    return own.substr(0, own.find(from)) + to + own.substr(own.find(from) + from.size());
  };
  CHECK(meet(with(""))->used);
  CHECK(meet(with(kOwn))->used);
  CHECK(meet(with(changed("NHD", "HND")))->used);  // With one head there is no difference.
  for (const std::string& text :
       {std::string("KV"), changed("layers=2", "layers=3"), changed("block_tokens=4", "block_tokens=8"),
        changed("dim=4", "dim=8"), changed("layers=2", "layers=0"), std::string(300, 'x')}) {
    const auto source = meet(with(text));
    CHECK(source->closed && source->core.stats().protocol_errors == 1);
  }
  const auto source = meet(with(changed("bfloat16", "float16")));
  const auto refused = source->last<frames::Refuse>();
  CHECK(source->closed && source->core.stats().protocol_errors == 0 && refused.cause == Cause::layout);
  for (const char* word :
       {"dtype", "'layers=2 kv_heads=1 dim=4 dtype=float16", "'layers=2 kv_heads=1 dim=4 dtype=bfl"}) {
    CHECK(refused.detail.find(word) != std::string::npos);
  }
}

TEST(a_handshake_refuses_what_was_not_offered) {
  const auto agree = [](const frames::Agreed& agreed) {
    MetSink sink;
    welcome(sink, identity());
    sink.hear(kAtSink, agreed);
    CHECK(sink.closed && !sink.used && sink.core.stats().protocol_errors == 1);
  };
  agree({"tcp", false, ""});
  agree({"shm", true, ""});
}

TEST(a_handshake_precedes_all_other_frames) {
  const auto knock = [](auto frame) {
    MetSource source;
    source.hear(kAtSource, frame);
    CHECK(source.closed && source.core.stats().parked == 0 && source.core.stats().protocol_errors == 1);
  };
  knock(frames::Ask{.pull = 1, .key = Key{1}, .blocks = 1, .tokens = 4});
  knock(frames::Release{Key{1}, Cause::none});
  knock(frames::KeepAlive{1});
  knock(frames::Hello{});
  knock(frames::Answer{true, {}, {}});
}

TEST(handshakes_are_bounded_in_time_and_number) {
  MetSource source;
  for (const ConnectionId connection : {3u, 5u}) source.step(0, Accepted{connection});
  CHECK(!source.closed && source.core.stats().connections == 3);
  source.step(0, Accepted{7});
  CHECK(source.closed && source.core.stats().connections == 3);
  CHECK(source.core.wake_s() <= 10);
  source.step(10, SetFaults{});
  CHECK(source.core.stats().connections == 0);
}

TEST(a_restarted_pull_uses_no_sequence_number_again) {
  MetSink sink;
  welcome(sink, identity());
  sink.hear(kAtSink, frames::Agreed{"tcp", true, ""});
  const PullId pull = sink.last<frames::Ask>().pull;
  const auto request = [&](std::uint64_t generation) {
    sink.hear(kAtSink, frames::Opened{pull, generation});
    sink.hear(kAtSink, frames::Ready{.pull = pull, .generation = generation, .tokens = 4});
    return sink.last<frames::Request>();
  };
  const frames::Request first = request(1);
  sink.hear(kAtSink, frames::Revoked{pull, 2});
  sink.step(0, PlacingStopped{pull});
  const frames::Request second = request(2);
  CHECK(first.generation == 1 && second.generation == 2 && second.sequence > first.sequence + 1);
}

TEST(a_release_may_come_before_its_lease) {
  MetSource source;
  source.hear(kAtSource,
              frames::Identify{identity(), proof("sink", MetSource::sink_nonce(), source.nonce, identity())});
  source.hear(kAtSource, frames::Release{Key{1}, Cause::none});
  source.step(0, OpenLease{Key{1}});
  CHECK(source.core.stats().leases == 0);
  source.step(0, OpenLease{Key{2}});
  CHECK(source.core.stats().leases == 1);
}

TEST(a_trailer_of_another_generation_does_not_count) {
  const auto done = [](std::uint64_t generation) {
    MetSink sink;
    welcome(sink, identity());
    sink.hear(kAtSink, frames::Agreed{"tcp", true, ""});
    const PullId pull = sink.last<frames::Ask>().pull;
    sink.hear(kAtSink, frames::Opened{pull, 1});
    sink.hear(kAtSink, frames::Ready{.pull = pull, .generation = 1, .tokens = 4});
    for (const std::uint32_t sequence : {0u, 1u}) {
      sink.step(0, DataArrived{kAtSink, pull, sequence, 64});
      sink.step(0, Placed{kAtSink, pull, sequence, -1, 7});
      sink.hear(kAtSink, frames::ChunkEnd{pull, sequence, generation, -1, 7});
    }
    return sink.core.stats().pulls_done;
  };
  CHECK(done(1) == 1 && done(0) == 0 && done(2) == 0);
}

TEST(only_ways_that_should_work_here_count_as_fallen_back_from) {
  const auto fell_back = [](bool fits) {
    Options options = options_of(1, {"shm", "tcp"});
    options.local = {"shm"};
    options.host = "here";
    MetSource source(options);
    frames::Identity sink = identity();
    sink.backends = "shm,tcp";
    sink.host = "here";
    source.hear(kAtSource, frames::Identify{sink, proof("sink", MetSource::sink_nonce(), source.nonce, sink)});
    source.step(0, BackendOffered{kAtSource, false, {}, "no memory", fits});
    const auto agreed = source.last<frames::Agreed>();
    CHECK(agreed.backend == "tcp" && agreed.declined == "shm: no memory");
    return agreed.fallback;
  };
  CHECK(fell_back(true));
  CHECK(!fell_back(false));
}

TEST(ways_within_a_host_are_not_tried_with_another) {
  for (const std::string backends : {"shm,tcp", "shm"}) {
    Options options = options_of(1, {"shm", "tcp"});
    options.local = {"shm"};
    options.host = "here";
    MetSource source(options);
    frames::Identity sink = identity();
    sink.backends = backends;
    sink.host = "there";
    source.hear(kAtSource, frames::Identify{sink, proof("sink", MetSource::sink_nonce(), source.nonce, sink)});
    if (backends == "shm") {
      CHECK(source.last<frames::Refuse>().detail.starts_with("no common backend between two hosts"));
    } else {
      const auto agreed = source.last<frames::Agreed>();
      CHECK(agreed.backend == "tcp" && agreed.declined.empty() && !agreed.fallback);
    }
  }
}
