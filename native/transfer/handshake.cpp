#include "transfer/handshake.h"

#include <algorithm>
#include <stdexcept>

#include "layout/plan.h"

namespace baton::transfer {
namespace {

constexpr std::string_view kInline = "tcp";  // The backend that needs no agreement: it is the connection itself.

std::string join(const std::vector<std::string>& names) {
  std::string joined;
  for (const auto& name : names) joined += (joined.empty() ? "" : ",") + name;
  return joined;
}

std::vector<std::string> split(const std::string& joined, char between = ',') {
  std::vector<std::string> names;
  std::size_t start = 0;
  while (start <= joined.size()) {
    const std::size_t end = std::min(joined.find(between, start), joined.size());
    if (end > start) names.push_back(joined.substr(start, end - start));
    start = end + 1;
  }
  return names;
}

// The words of a text that another lacks.
std::string words_beyond(const std::string& other, const std::string& text) {
  const auto known = split(other, ' ');
  std::string words;
  for (const auto& word : split(text, ' ')) {
    if (std::find(known.begin(), known.end(), word) == known.end()) words += (words.empty() ? "" : " ") + word;
  }
  return words;
}

// Takes the same time wherever the first difference lies, so a peer cannot guess a proof byte by byte.
bool same(const Digest& a, const Digest& b) {
  std::uint8_t difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference = static_cast<std::uint8_t>(difference | (a[i] ^ b[i]));
  return difference == 0;
}

Bytes view(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

// Returns nothing if a peer's layout makes no sense or contradicts its numbers. Numbers without a layout must equal
// this side's.
std::optional<Geometry> geometry_of(const frames::Identity& identity) {
  Geometry geometry{.fingerprint = identity.fingerprint,
                    .layers = identity.layers,
                    .blocks = 1,
                    .block_bytes = identity.block_bytes,
                    .block_tokens = identity.block_tokens};
  if (identity.layout.empty()) return geometry;
  try {
    geometry.layout = layout::parse(identity.layout);
    check(geometry);
  } catch (const std::invalid_argument&) {
    return std::nullopt;
  }
  return geometry;
}

}  // namespace

Handshake::Handshake(Side side, ConnectionId connection, const Options& options, const Geometry& geometry,
                     const Digest& nonce, std::uint64_t expected_incarnation)
    : options_(options),
      geometry_(geometry),
      side_(side),
      step_(side == Side::sink ? Step::challenge : Step::hello),
      connection_(connection),
      expected_incarnation_(expected_incarnation),
      own_nonce_(nonce) {}

void Handshake::start(Outbox& out) {
  out.send(connection_, frames::Hello{.nonce = own_nonce_});
}

frames::Identity Handshake::identity() const {
  return {.incarnation = options_.incarnation,
          .fingerprint = geometry_.fingerprint,
          .layers = geometry_.layers,
          .block_bytes = geometry_.block_bytes,
          .block_tokens = geometry_.block_tokens,
          .chunk_blocks = geometry_.block_bytes == 0 ? 0 : chunk_blocks(geometry_, options_.limits),
          .backends = join(options_.backends),
          .checksum = options_.checksum,
          .lease_ttl_ms = static_cast<std::uint32_t>(std::clamp(options_.lease_ttl_s * 1000, 1.0, 1e9)),
          .layout = geometry_.layout ? layout::to_string(*geometry_.layout) : "",
          .host = options_.host};
}

Digest Handshake::proof(Side of, const frames::Identity& identity) const {
  const Digest key = Blake3().add(view("baton/agent/1")).add(view(options_.secret)).digest();
  Blob said;
  Writer writer(said);
  frames::Identity copy = identity;
  std::apply([&](auto&... field) { (writer.put(field), ...); }, copy.fields());
  const bool own_is_sink = side_ == Side::sink;
  return Blake3(key)
      .add(view(of == Side::sink ? "sink" : "source"))
      .add(own_is_sink ? own_nonce_ : peer_nonce_)
      .add(own_is_sink ? peer_nonce_ : own_nonce_)
      .add(said)
      .digest();
}

Handshake::Outcome Handshake::compare(const frames::Identity& identity, Outbox& out) {
  auto peer = geometry_of(identity);
  if (!peer) return Outcome::malformed;
  peer_ = std::move(*peer);
  const bool own_is_sink = side_ == Side::sink;
  const Geometry& sink = own_is_sink ? geometry_ : peer_;
  const Geometry& source = own_is_sink ? peer_ : geometry_;
  const auto differ = [&](const char* what, const std::string& of_sink, const std::string& of_source,
                          Cause cause = Cause::refused) {
    return refuse(std::string(what) + " differs: the sink has '" + of_sink + "', the source has '" + of_source + "'",
                  out, cause);
  };
  const auto number = [&](const char* what, std::uint64_t of_sink, std::uint64_t of_source) {
    return differ(what, std::to_string(of_sink), std::to_string(of_source));
  };
  if (sink.fingerprint != source.fingerprint) {
    return differ("model", words_beyond(source.fingerprint, sink.fingerprint),
                  words_beyond(sink.fingerprint, source.fingerprint), Cause::model);
  }
  if (sink.layout && source.layout) {
    try {
      (void)layout::common_heads(*source.layout, *sink.layout);
      converts_ = !layout::identical(*source.layout, *sink.layout);
    } catch (const layout::Mismatch& mismatch) {
      return refuse(mismatch.what(), out, Cause::layout);
    }
  } else {
    if (sink.layers != source.layers) return number("number of layers", sink.layers, source.layers);
    if (sink.tensors() != source.tensors()) return number("number of tensors", sink.tensors(), source.tensors());
    if (sink.block_bytes != source.block_bytes) {
      return number("bytes per block", sink.block_bytes, source.block_bytes);
    }
    if (sink.block_tokens != source.block_tokens) {
      return number("tokens per block", sink.block_tokens, source.block_tokens);
    }
  }
  // Both ends cut the source's blocks into the same chunks.
  const std::uint32_t expected = chunk_blocks(peer_, options_.limits);
  if (identity.chunk_blocks == expected) return Outcome::going;
  return number("blocks per chunk", own_is_sink ? expected : identity.chunk_blocks,
                own_is_sink ? identity.chunk_blocks : expected);
}

Handshake::Outcome Handshake::refuse(std::string detail, Outbox& out, Cause cause) {
  detail_ = std::move(detail);
  cause_ = cause;
  if (side_ == Side::source) out.send(connection_, frames::Refuse{cause_, detail_});
  return Outcome::refused;
}

Handshake::Outcome Handshake::on_frame(FrameType type, Bytes body, Outbox& out) {
  const auto handle = [&]<class Frame>(Side side, Step step, Outcome (Handshake::*handler)(const Frame&, Outbox&)) {
    const auto frame = decode<Frame>(body);
    if (side_ != side || step_ != step || !frame) return Outcome::malformed;
    return (this->*handler)(*frame, out);
  };
  switch (type) {
    case FrameType::hello:
      return handle(Side::source, Step::hello, &Handshake::on_hello);
    case FrameType::challenge:
      return handle(Side::sink, Step::challenge, &Handshake::on_challenge);
    case FrameType::identify:
      return handle(Side::source, Step::identify, &Handshake::on_identify);
    case FrameType::welcome:
      return handle(Side::sink, Step::welcome, &Handshake::on_welcome);
    case FrameType::agreed:
      return handle(Side::sink, Step::backends, &Handshake::on_agreed);
    case FrameType::refuse: {
      const auto frame = decode<frames::Refuse>(body);
      if (side_ != Side::sink || !frame) return Outcome::malformed;
      const bool named = frame->cause == Cause::layout || frame->cause == Cause::model;
      return refuse(frame->detail, out, named ? frame->cause : Cause::refused);
    }
    case FrameType::offer: {
      const auto frame = decode<frames::Offer>(body);
      if (side_ != Side::sink || step_ != Step::backends || !frame) return Outcome::malformed;
      out.put(AcceptBackend{connection_, frame->backend, frame->offer});
      return Outcome::going;
    }
    case FrameType::answer: {
      const auto frame = decode<frames::Answer>(body);
      if (side_ != Side::source || step_ != Step::backends || !frame) return Outcome::malformed;
      if (!frame->ok) return decline(frame->why, frame->fits, out);
      note_ = frame->why;
      out.put(CheckBackend{connection_, backend_, frame->proof});
      return Outcome::going;
    }
    default:
      return Outcome::malformed;
  }
}

Handshake::Outcome Handshake::on_hello(const frames::Hello& hello, Outbox& out) {
  if (hello.magic != kMagic) return Outcome::malformed;
  if (hello.version != kVersion) {
    return refuse("protocol version differs: the sink speaks " + std::to_string(hello.version) +
                      ", the source speaks " + std::to_string(kVersion),
                  out);
  }
  peer_nonce_ = hello.nonce;
  step_ = Step::identify;
  out.send(connection_, frames::Challenge{.nonce = own_nonce_});
  return Outcome::going;
}

Handshake::Outcome Handshake::on_challenge(const frames::Challenge& challenge, Outbox& out) {
  peer_nonce_ = challenge.nonce;
  step_ = Step::welcome;
  const frames::Identity own = identity();
  out.send(connection_, frames::Identify{own, proof(Side::sink, own)});
  return Outcome::going;
}

Handshake::Outcome Handshake::on_identify(const frames::Identify& identify, Outbox& out) {
  if (!same(identify.proof, proof(Side::sink, identify.identity))) {
    return refuse("the sink does not prove the source's secret", out);
  }
  const frames::Identity own = identity();
  if (const Outcome outcome = compare(identify.identity, out); outcome != Outcome::going) return outcome;
  checksum_ = options_.checksum || identify.identity.checksum;
  const bool elsewhere = identify.identity.host != options_.host;
  const auto wanted = split(identify.identity.backends);
  const auto has = [](const std::vector<std::string>& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  for (auto name = wanted.rbegin(); name != wanted.rend(); ++name) {
    const bool reaches = !elsewhere || !has(options_.local, *name);
    if (has(options_.backends, *name) && reaches) candidates_.push_back(*name);
  }
  if (candidates_.empty()) {
    return refuse("no common backend" + std::string(elsewhere ? " between two hosts" : "") + ": the sink has '" +
                      identify.identity.backends + "', the source has '" + own.backends + "'",
                  out);
  }
  out.send(connection_, frames::Welcome{own, proof(Side::source, own)});
  step_ = Step::backends;
  return offer_next(out);
}

Handshake::Outcome Handshake::on_welcome(const frames::Welcome& welcome, Outbox& out) {
  if (!same(welcome.proof, proof(Side::source, welcome.identity))) {
    return refuse("the source does not prove the sink's secret", out);
  }
  if (const Outcome outcome = compare(welcome.identity, out); outcome != Outcome::going) return outcome;
  if (welcome.identity.incarnation != expected_incarnation_) {
    refuse("the source was restarted: its leases are gone", out);
    cause_ = Cause::unreachable;
    return Outcome::refused;
  }
  if (converts_) out.put(Stage{connection_, peer_});
  lease_ttl_s_ = welcome.identity.lease_ttl_ms / 1000.0;
  step_ = Step::backends;
  return Outcome::going;
}

Handshake::Outcome Handshake::offer_next(Outbox& out) {
  if (candidates_.empty()) {
    const std::string why = "no backend that both sides have works between them: " + declined_;
    if (!only_equal_) return refuse(why, out);
    return refuse(why + "; the sink has '" + layout::to_string(*peer_.layout) + "', the source has '" +
                      layout::to_string(*geometry_.layout) + "'",
                  out, Cause::layout);
  }
  backend_ = candidates_.back();
  candidates_.pop_back();
  if (backend_ == kInline) return agree(out);
  out.put(OfferBackend{connection_, backend_});
  return Outcome::going;
}

Handshake::Outcome Handshake::decline(const std::string& why, bool fits, Outbox& out) {
  fallback_ = fallback_ || fits;
  only_equal_ = only_equal_ || (converts_ && !fits);
  declined_ += (declined_.empty() ? "" : "; ") + backend_ + ": " + why;
  return offer_next(out);
}

Handshake::Outcome Handshake::on_offered(const BackendOffered& offered, Outbox& out) {
  if (step_ != Step::backends) return Outcome::going;
  if (!offered.ok) return decline(offered.why, offered.fits, out);
  out.send(connection_, frames::Offer{backend_, offered.offer});
  return Outcome::going;
}

void Handshake::on_accepted(const BackendAccepted& accepted, Outbox& out) {
  out.send(connection_, frames::Answer{accepted.ok, accepted.proof, accepted.why, accepted.fits});
}

Handshake::Outcome Handshake::on_checked(bool ok, Outbox& out) {
  if (step_ != Step::backends) return Outcome::malformed;  // The sink answered twice.
  if (!ok) return decline("the sink reached something else than was offered", true, out);
  if (!note_.empty()) declined_ += (declined_.empty() ? "" : "; ") + backend_ + ": " + note_;
  return agree(out);
}

Handshake::Outcome Handshake::agree(Outbox& out) {
  step_ = Step::agreed;
  out.put(UseBackend{connection_, backend_, checksum_});
  out.send(connection_, frames::Agreed{backend_, checksum_, declined_, fallback_});
  return Outcome::agreed;
}

Handshake::Outcome Handshake::on_agreed(const frames::Agreed& agreed, Outbox& out) {
  const auto& have = options_.backends;
  if (std::find(have.begin(), have.end(), agreed.backend) == have.end()) return Outcome::malformed;
  if (options_.checksum && !agreed.checksum) return Outcome::malformed;
  backend_ = agreed.backend;
  checksum_ = agreed.checksum;
  declined_ = agreed.declined;
  fallback_ = agreed.fallback;
  step_ = Step::agreed;
  out.put(UseBackend{connection_, backend_, checksum_});
  return Outcome::agreed;
}

}  // namespace baton::transfer
