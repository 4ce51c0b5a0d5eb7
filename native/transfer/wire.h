// The frames between two agents.
//
//   +--------------+--------+----------------+     data frames only:
//   | length (u32) |  type  |  body          |  +  payload, `bytes` of the body long
//   +--------------+--------+----------------+
//    bytes of type
//    and body
//
// Integers are little-endian; strings and blobs carry a u16 length. The sink opens the connection and
// asks; the source answers and serves. A frame that is too long, too short, of the wrong side or with
// a value out of range ends its connection.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "transfer/events.h"
#include "transfer/types.h"

namespace baton::transfer {

inline constexpr std::uint32_t kMagic = 0x4E544142;  // "BATN"
inline constexpr std::uint16_t kVersion = 5;
inline constexpr std::size_t kLengthBytes = 4;
inline constexpr std::size_t kFrameBytesMax = 16 << 10;
inline constexpr std::size_t kTextBytesMax = 4 << 10;
inline constexpr std::size_t kBlobBytesMax = kFrameBytesMax - 256;  // Leaves room for what else is in its frame.
inline constexpr std::uint16_t kAllLayers = 0xFFFF;

enum class FrameType : std::uint8_t {
  hello = 1,
  challenge,
  identify,
  welcome,
  refuse,
  offer,
  answer,
  agreed,
  ask,
  opened,
  ready,
  revoked,
  ended,
  request,
  data,
  chunk_end,
  credit,
  keep_alive,
  keep_alive_answer,
  release,
  grant,
  fetched,
};

namespace frames {

// Handshake. Only `hello` and `challenge` travel before the sink has proven that it knows the secret.
struct Hello {  // sink → source
  static constexpr auto type = FrameType::hello;
  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  Digest nonce{};
  auto fields() { return std::tie(magic, version, nonce); }
};
struct Challenge {  // source → sink
  static constexpr auto type = FrameType::challenge;
  std::uint16_t version = kVersion;
  Digest nonce{};
  auto fields() { return std::tie(version, nonce); }
};
struct Identity {
  std::uint64_t incarnation = 0;
  std::string fingerprint;
  std::uint32_t layers = 0;
  std::uint64_t block_bytes = 0;
  std::uint32_t block_tokens = 0;
  std::uint32_t chunk_blocks = 0;
  std::string backends;  // Joined by commas, the preferred first.
  bool checksum = true;
  std::uint32_t lease_ttl_ms = 0;  // TTL of this side's leases.
  std::string layout;              // Empty: not declared.
  std::string host;                // Equal hosts share memory; empty: not declared.
  auto fields() {
    return std::tie(incarnation, fingerprint, layers, block_bytes, block_tokens, chunk_blocks, backends, checksum,
                    lease_ttl_ms, layout, host);
  }
};
struct Identify {  // sink → source
  static constexpr auto type = FrameType::identify;
  Identity identity;
  Digest proof{};
  auto fields() { return std::tuple_cat(identity.fields(), std::tie(proof)); }
};
struct Welcome {  // source → sink
  static constexpr auto type = FrameType::welcome;
  Identity identity;
  Digest proof{};
  auto fields() { return std::tuple_cat(identity.fields(), std::tie(proof)); }
};
struct Refuse {  // source → sink
  static constexpr auto type = FrameType::refuse;
  Cause cause = Cause::refused;
  std::string detail;
  auto fields() { return std::tie(cause, detail); }
};
struct Offer {  // source → sink
  static constexpr auto type = FrameType::offer;
  std::string backend;
  Blob offer;
  auto fields() { return std::tie(backend, offer); }
};
struct Answer {  // sink → source
  static constexpr auto type = FrameType::answer;
  bool ok = false;
  Blob proof;
  std::string why;   // The reason if it failed, otherwise a note about this way.
  bool fits = true;  // Whether this way suits the two pools.
  auto fields() { return std::tie(ok, proof, why, fits); }
};
struct Agreed {  // source → sink
  static constexpr auto type = FrameType::agreed;
  std::string backend;
  bool checksum = true;
  std::string declined;   // Preferred backends that do not work, with the reasons; and a note.
  bool fallback = false;  // Whether one of them should work, since it suits both pools and hosts.
  auto fields() { return std::tie(backend, checksum, declined, fallback); }
};

// The frames of a pull.
struct Ask {  // sink → source
  static constexpr auto type = FrameType::ask;
  PullId pull = 0;
  Key key{};
  std::uint32_t first_block = 0;  // Counted in the lease, not in a pool.
  std::uint32_t blocks = 0;
  std::uint32_t tokens = 0;
  bool data_only = false;  // Carries only requests and their data; all else uses the control connection.
  auto fields() { return std::tie(pull, key, first_block, blocks, tokens, data_only); }
};
struct Opened {  // source → sink
  static constexpr auto type = FrameType::opened;
  PullId pull = 0;
  std::uint64_t generation = 0;
  auto fields() { return std::tie(pull, generation); }
};
struct Ready {  // source → sink
  static constexpr auto type = FrameType::ready;
  PullId pull = 0;
  std::uint64_t generation = 0;
  std::uint16_t layer = kAllLayers;
  std::uint32_t tokens = 0;
  auto fields() { return std::tie(pull, generation, layer, tokens); }
};
struct Revoked {  // source → sink
  static constexpr auto type = FrameType::revoked;
  PullId pull = 0;
  std::uint64_t generation = 0;  // The generation of the next `opened`.
  auto fields() { return std::tie(pull, generation); }
};
struct Ended {  // source → sink
  static constexpr auto type = FrameType::ended;
  PullId pull = 0;
  Cause cause = Cause::none;
  std::string detail;
  bool held = false;  // The lease continues; a release ends it before its time is up.
  auto fields() { return std::tie(pull, cause, detail, held); }
};
struct Request {  // sink → source
  static constexpr auto type = FrameType::request;
  PullId pull = 0;
  std::uint64_t generation = 0;
  std::uint32_t sequence = 0;
  std::uint32_t layer = 0;  // Counts tensors, see Geometry; `Ready` counts layers.
  std::uint32_t first_block = 0;
  std::uint32_t blocks = 0;
  auto fields() { return std::tie(pull, generation, sequence, layer, first_block, blocks); }
};
struct Data {  // source → sink
  static constexpr auto type = FrameType::data;
  PullId pull = 0;
  std::uint32_t sequence = 0;
  std::uint64_t bytes = 0;
  auto fields() { return std::tie(pull, sequence, bytes); }
};
// The trailer. `generation` was read after the chunk's bytes were; 0: the lease is gone.
struct ChunkEnd {  // source → sink
  static constexpr auto type = FrameType::chunk_end;
  PullId pull = 0;
  std::uint32_t sequence = 0;
  std::uint64_t generation = 0;
  std::int32_t slot = -1;
  std::uint32_t crc = 0;
  auto fields() { return std::tie(pull, sequence, generation, slot, crc); }
};
// The sink may read the chunk itself, and says `fetched` when it has; then the trailer follows.
struct Grant {  // source → sink
  static constexpr auto type = FrameType::grant;
  PullId pull = 0;
  std::uint32_t sequence = 0;
  Blob where;
  auto fields() { return std::tie(pull, sequence, where); }
};
struct Fetched {  // sink → source
  static constexpr auto type = FrameType::fetched;
  PullId pull = 0;
  std::uint32_t sequence = 0;
  auto fields() { return std::tie(pull, sequence); }
};
struct CreditSlot {  // sink → source
  static constexpr auto type = FrameType::credit;
  std::int32_t slot = 0;
  auto fields() { return std::tie(slot); }
};
struct KeepAlive {  // sink → source
  static constexpr auto type = FrameType::keep_alive;
  PullId pull = 0;
  auto fields() { return std::tie(pull); }
};
struct KeepAliveAnswer {  // source → sink
  static constexpr auto type = FrameType::keep_alive_answer;
  PullId pull = 0;
  auto fields() { return std::tie(pull); }
};
struct Release {  // sink → source
  static constexpr auto type = FrameType::release;
  Key key{};
  Cause cause = Cause::none;  // None: everything arrived, or nothing was needed.
  auto fields() { return std::tie(key, cause); }
};

}  // namespace frames

// Appends values to a frame.
class Writer {
 public:
  explicit Writer(Blob& out) : out_(out) {}
  void put(bool value) { put(static_cast<std::uint8_t>(value)); }
  void put(Cause value) { put(static_cast<std::uint8_t>(value)); }
  void put(const std::string& text);
  void put(const Blob& blob);
  template <std::size_t N>
  void put(const std::array<std::uint8_t, N>& bytes) {
    out_.insert(out_.end(), bytes.begin(), bytes.end());
  }
  template <class T>
    requires std::is_integral_v<T>
  void put(T value) {
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      out_.push_back(static_cast<std::uint8_t>(static_cast<std::make_unsigned_t<T>>(value) >> (8 * i)));
    }
  }

 private:
  Blob& out_;
};

// Takes values from a body; after the first that does not fit, `ok` is false.
class Reader {
 public:
  explicit Reader(Bytes body) : rest_(body) {}
  void get(bool& value);
  void get(Cause& value);
  void get(std::string& text);
  void get(Blob& blob);
  template <std::size_t N>
  void get(std::array<std::uint8_t, N>& bytes) {
    const Bytes taken = take(N);
    if (ok_) std::copy(taken.begin(), taken.end(), bytes.begin());
  }
  template <class T>
    requires std::is_integral_v<T>
  void get(T& value) {
    const Bytes taken = take(sizeof(T));
    if (!ok_) return;
    std::make_unsigned_t<T> bits = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      bits = static_cast<std::make_unsigned_t<T>>(bits | std::make_unsigned_t<T>{taken[i]} << (8 * i));
    }
    value = static_cast<T>(bits);
  }
  [[nodiscard]] bool finished() const { return ok_ && rest_.empty(); }

 private:
  Bytes take(std::size_t size);
  Bytes rest_;
  bool ok_ = true;
};

// Returns the whole frame, length included.
template <class Frame>
[[nodiscard]] Blob encode(Frame frame) {
  Blob out(kLengthBytes);
  Writer writer(out);
  writer.put(static_cast<std::uint8_t>(Frame::type));
  std::apply([&](auto&... field) { (writer.put(field), ...); }, frame.fields());
  const auto length = static_cast<std::uint32_t>(out.size() - kLengthBytes);
  for (std::size_t i = 0; i < kLengthBytes; ++i) out[i] = static_cast<std::uint8_t>(length >> (8 * i));
  return out;
}

// Returns nothing when the body is malformed. `body` follows the type byte.
template <class Frame>
[[nodiscard]] std::optional<Frame> decode(Bytes body) {
  Frame frame;
  Reader reader(body);
  std::apply([&](auto&... field) { (reader.get(field), ...); }, frame.fields());
  if (!reader.finished()) return std::nullopt;
  return frame;
}

}  // namespace baton::transfer
