// Code shared by the data paths that read through RDMA adapters, from host memory (verbs.cpp) or a GPU's
// (gpudirect.cpp): the handshake, and the sink's reads.
//
//   source                                              sink
//    Offer(rail, address, token and pool with keys) ──▶  connects to the address
//    connects  ◀── Answer(address)
//    Offer()   ──▶                                       reads the token as it will read blocks
//    compares  ◀── Answer(token)
//
// Peers may only read, and only the pool and that token. No peer writes into a pool: when a pull ends, this side
// alone decides that nothing more is written (docs/decisions/0010-reads-by-the-sink.md).
#pragma once

#include <optional>
#include <vector>

#include "transfer/one_sided.h"
#include "transfer/verbs_queue.h"

namespace baton::transfer {

// Throws std::runtime_error if this agent has no adapters.
[[nodiscard]] VerbsDevices& verbs_devices(const Site& site);

struct VerbsOffer {
  std::uint32_t rail = 0;
  VerbsAddress address;
  std::uint64_t proof_address = 0;
  std::uint32_t proof_key = 0;
  std::vector<std::uint32_t> layer_keys;
  RemotePool pool;

  void put(class Writer& writer) const;
  // Returns nothing, with the reason in `why`, if the offer makes no sense for this side.
  [[nodiscard]] static std::optional<VerbsOffer> get(const Blob& blob, const Site& site, std::string& why);
};

// The source's part: its adapter serves all reads by itself.
class VerbsServer {
 public:
  // `proof`: registered memory at `proof_address` that holds `token`.
  VerbsServer(const Site& site, VerbsDevice& device, const VerbsMemory& proof, std::uint64_t proof_address, Blob token);

  [[nodiscard]] Blob offer() const;
  [[nodiscard]] bool check(const Blob& answer);
  [[nodiscard]] bool has_more_to_offer() const { return connected_ && !proven_; }

 private:
  VerbsOffer offer_;
  const Blob token_;
  bool connected_ = false;
  bool proven_ = false;
  VerbsQueue queue_;
};

class VerbsSink : public ReadingSink {
 public:
  // The source's proof is read into `landing`, which outlives this object, as all does that it reads into.
  VerbsSink(const Site& site, VerbsOffer offer, VerbsDevice& device, const iovec& landing,
            const VerbsMemory& landing_memory);

  std::optional<Blob> proof() const override;
  bool resume(const Blob&) override;
  int fd() const override { return queue_.fd(); }
  std::string why() const override { return queue_.why(); }

 protected:
  // Waits until all that was read so far is in place.
  virtual void settle_writes() {}
  // The token in the proof that was read.
  [[nodiscard]] virtual Blob token_read() = 0;
  // So many pieces of a chunk were read.
  virtual void landed(Read& read, std::size_t pieces) { ended(read, pieces); }
  bool poll() override;
  bool begin(Read& read) override;

 private:
  const VerbsOffer offer_;
  VerbsDevice& device_;
  const iovec landing_;
  const std::uint32_t landing_key_;
  bool resumed_ = false;
  std::optional<Blob> token_;
  std::vector<VerbsQueue::Batch> ended_;
  VerbsQueue queue_;  // Destroyed first: it is the fence.
};

}  // namespace baton::transfer
