// The handshake between two agents. One object per connection, on each side.
//
//   sink                                    source
//    Hello(version, nonce)            ──▶
//                                     ◀──   Challenge(version, nonce)
//    Identify(identity, proof)        ──▶                                 proof: keyed hash over side, both
//                                     ◀──   Welcome(identity, proof)      nonces and identity; or Refuse
//                                     ◀──   Offer(backend, offer)         for each backend both sides have that may
//    Answer(ok, proof, why, fits)     ──▶                                 reach the other host, until one works; tcp
//                                                                         needs no offer
//                                     ◀──   Agreed(backend, checksum, declined, fallback)
//
// The secret authenticates the two agents; it does not encrypt or sign the later traffic.
#pragma once

#include <string>
#include <vector>

#include "transfer/geometry.h"
#include "transfer/outbox.h"

namespace baton::transfer {

class Handshake {
 public:
  enum class Side : std::uint8_t { sink, source };
  enum class Outcome : std::uint8_t { going, agreed, refused, malformed };

  // `expected_incarnation`: the source's, from its endpoint; 0 on the source's side.
  Handshake(Side side, ConnectionId connection, const Options& options, const Geometry& geometry, const Digest& nonce,
            std::uint64_t expected_incarnation);

  void start(Outbox& out);  // Sink only.
  Outcome on_frame(FrameType type, Bytes body, Outbox& out);
  Outcome on_offered(const BackendOffered& offered, Outbox& out);
  void on_accepted(const BackendAccepted& accepted, Outbox& out);
  Outcome on_checked(bool ok, Outbox& out);

  [[nodiscard]] Side side() const { return side_; }
  [[nodiscard]] bool agreed() const { return step_ == Step::agreed; }
  [[nodiscard]] const std::string& backend() const { return backend_; }
  [[nodiscard]] bool checksum() const { return checksum_; }
  // Sink, once agreed: lifetime of the source's leases without a keep-alive.
  [[nodiscard]] double lease_ttl_s() const { return lease_ttl_s_; }
  [[nodiscard]] const std::string& declined() const { return declined_; }
  // Once agreed: whether a preferred backend that should work here failed.
  [[nodiscard]] bool fallback() const { return fallback_; }
  // Once agreed: the shape of the other side's blocks.
  [[nodiscard]] const Geometry& peer() const { return peer_; }
  // Whether the source's blocks must be converted into the sink's.
  [[nodiscard]] bool converts() const { return converts_; }
  // After `refused`: the reason, and the cause under which pulls fail.
  [[nodiscard]] const std::string& detail() const { return detail_; }
  [[nodiscard]] Cause cause() const { return cause_; }

 private:
  enum class Step : std::uint8_t { hello, challenge, identify, welcome, backends, agreed };

  [[nodiscard]] frames::Identity identity() const;
  [[nodiscard]] Digest proof(Side of, const frames::Identity& identity) const;
  // Whether blocks can move from one side to the other; sets `peer_`.
  Outcome compare(const frames::Identity& identity, Outbox& out);
  Outcome refuse(std::string detail, Outbox& out, Cause cause = Cause::refused);
  Outcome on_hello(const frames::Hello& hello, Outbox& out);
  Outcome on_challenge(const frames::Challenge& challenge, Outbox& out);
  Outcome on_identify(const frames::Identify& identify, Outbox& out);
  Outcome on_welcome(const frames::Welcome& welcome, Outbox& out);
  Outcome on_agreed(const frames::Agreed& agreed, Outbox& out);
  Outcome offer_next(Outbox& out);
  Outcome decline(const std::string& why, bool fits, Outbox& out);
  Outcome agree(Outbox& out);

  const Options& options_;
  const Geometry& geometry_;
  Side side_;
  Step step_;
  ConnectionId connection_;
  std::uint64_t expected_incarnation_;
  Digest own_nonce_;
  Digest peer_nonce_{};
  Geometry peer_;
  bool converts_ = false;
  bool only_equal_ = false;              // A backend was declined that would have served equal layouts.
  std::vector<std::string> candidates_;  // Backends not tried yet, the preferred last.
  std::string backend_;
  bool checksum_ = true;
  std::string declined_;
  bool fallback_ = false;
  std::string note_;  // Note of the backend that is tried.
  double lease_ttl_s_ = 0;
  std::string detail_;
  Cause cause_ = Cause::none;
};

}  // namespace baton::transfer
