// The handshake, on both sides, with a peer that knows the secret or does not: its proofs are right if it wants them to
// be, whatever identity they are for.
#include "fuzz/input.h"
#include "tests/proof.h"
#include "transfer/core.h"

using namespace baton::fuzz;

namespace {

constexpr ConnectionId kAtSource = 1, kAtSink = 2;
constexpr const char* kLayout =
    "layers=2 kv_heads=2 dim=2 dtype=bfloat16 order=NHD form=fused packing=plain block_tokens=4 tp=0/1";

// The identity that fits, but for what the input changes.
frames::Identity identity_of(Input& input) {
  frames::Identity fits{.incarnation = 7,
                        .fingerprint = "model",
                        .layers = 2,
                        .block_bytes = 64,
                        .block_tokens = 4,
                        .chunk_blocks = 1024,
                        .backends = "direct,shm,tcp",
                        .checksum = true,
                        .lease_ttl_ms = 5000,
                        .layout = kLayout};
  std::size_t at = 0;
  const std::uint8_t changed = input.byte();
  // One letter of the layout, so that what comes of it may still make sense.
  if (changed == 255) fits.layout[input.byte() % fits.layout.size()] = static_cast<char>(input.byte());
  std::apply([&](auto&... field) { ((at++ == changed ? input.fill(field) : void()), ...); }, fits.fields());
  return fits;
}

class Side {
 public:
  explicit Side(bool source) : source_(source), core_(options()) {
    core_.set_geometry({"model", 2, 16, 64, 4, baton::layout::parse(kLayout)});
    if (source) {
      step(Accepted{kAtSource});
    } else {
      step(StartPull{Key{1}, "10.0.0.1:80/0000000000000007", 0, 8, {1, 2}, 5});
      step(Connected{kAtSink});
    }
  }

  void hear(Blob frame) { step(FrameArrived{connection(), std::move(frame)}); }
  void step(const Event& event) {
    for (const Action& action : core_.step(now_s_, {&event, 1})) on(action);
  }
  void prove(Input& input) {
    const auto identity = identity_of(input);
    baton::Digest shown =
        baton::tests::proof(source_ ? "sink" : "source", source_ ? theirs_ : own_, source_ ? own_ : theirs_, identity);
    if (input.byte() % 8 == 0) shown[input.byte() % shown.size()] ^= 1;
    source_ ? hear(body(frames::Identify{identity, shown})) : hear(body(frames::Welcome{identity, shown}));
  }
  void greet() {
    source_ ? hear(body(frames::Hello{.nonce = theirs_})) : hear(body(frames::Challenge{.nonce = theirs_}));
  }
  void try_backend(Input& input) {
    if (input.byte() % 2 == 0) step(BackendOffered{connection(), input.byte() % 2 == 0, input.blob(3), "why"});
    if (source_) return step(BackendChecked{connection(), input.byte() % 2 == 0});
    step(BackendAccepted{connection(), input.byte() % 2 == 0, input.blob(3), "why"});
  }
  void end() {
    step(Closed{connection(), "over"});
    for (int i = 0; i < 20; ++i) {
      now_s_ += 2;
      step(SetFaults{});
    }
    require(core_.stats().pulls == 0 && core_.stats().connections == 0);
  }

 private:
  static Options options() {
    Options options;
    options.secret = "shared";
    options.backends = {"direct", "shm", "tcp"};
    options.incarnation = 7;
    options.entropy[0] = 1;
    return options;
  }
  [[nodiscard]] ConnectionId connection() const { return source_ ? kAtSource : kAtSink; }
  void on(const Action& action) {
    if (const auto* send = std::get_if<Send>(&action)) {
      const baton::Bytes said = baton::Bytes(send->frame).subspan(kLengthBytes + 1);
      if (const auto hello = decode<frames::Hello>(said); !source_ && hello) own_ = hello->nonce;
      if (const auto challenge = decode<frames::Challenge>(said); source_ && challenge) own_ = challenge->nonce;
    } else if (const auto* stop = std::get_if<StopPlacing>(&action)) {
      stopped_.push_back(stop->pull);
    }
    require(!std::holds_alternative<Serve>(action) && !std::holds_alternative<Place>(action));
    if (!stopped_.empty() && std::holds_alternative<Close>(action)) {
      const PullId pull = stopped_.back();
      stopped_.clear();
      step(PlacingStopped{pull});
    }
  }

  const bool source_;
  double now_s_ = 0;
  Core core_;
  baton::Digest own_{};
  const baton::Digest theirs_{9};
  std::vector<PullId> stopped_;
};

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const bool source = input.byte() % 2 == 0;
  Side side(source);
  for (int steps = 0; steps < 60 && !input.empty(); ++steps) {
    switch (input.byte() % 6) {
      case 0:
        side.greet();
        break;
      case 1:
        side.prove(input);
        break;
      case 2:
        side.try_backend(input);
        break;
      case 3:
        side.hear(input.blob(input.byte()));
        break;
      default:
        side.hear(source ? any_frame<frames::Hello, frames::Identify, frames::Answer, frames::Ask>(input)
                         : any_frame<frames::Challenge, frames::Welcome, frames::Refuse, frames::Offer, frames::Agreed,
                                     frames::Opened>(input));
    }
  }
  side.end();
  return 0;
}
