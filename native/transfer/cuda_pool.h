// A pool in CUDA memory: the words that its agent publishes to peers on the device, and the view of a peer's pool.
//
// Beside the pool lies one page of words, the control memory, which peers map and read, never write:
//
//    | token, 32 bytes | released | rest of 64 bytes | epoch 0 | epoch 1 | … | place 0 | place 1 | …
//
// `released` only grows: layers posted behind a stream's work are released once it has the value that they were posted
// with. An epoch belongs to one pull over one connection; it changes when the source stops serving that pull, and no
// value repeats. Adapters of peers read its beginning as the proof of their access, and behind it lie places where
// proofs arrive that this side's adapters read (see gpudirect.cpp).
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "transfer/one_sided.h"

namespace baton::transfer {

// The token by which a peer's kernel verifies that it reads the right memory.
struct CudaGrant {
  static constexpr std::size_t kBytes = 20;
  std::uint64_t released = 0;
  std::uint32_t epoch = 0;
  std::uint64_t epoch_is = 0;

  void put(class Writer& writer) const;
  void get(class Reader& reader);
};

void put_handle(class Writer& writer, const BatonGpuHandle& handle);
[[nodiscard]] BatonGpuHandle get_handle(class Reader& reader);

// The pieces of a chunk, in order, between the pool and a dense copy at `dense`; 0: no copy, only summed.
[[nodiscard]] std::vector<BatonGpuPiece> cuda_pieces(const Pool& pool, std::uint32_t layer,
                                                     std::span<const std::uint32_t> blocks, std::uint64_t dense);

// One agent's pool in CUDA memory.
class CudaPool {
  using Clock = std::chrono::steady_clock;

 public:
  static constexpr std::uint64_t kProofBytes = 8 << 10;  // Packets of full size, as in ProofMemory.
  static constexpr std::uint32_t kLandings = 128;        // Proofs that are read at a time.

  // Does not throw if the device is unusable: `device` does.
  CudaPool(const FabricOptions& options, const Pool& pool);

  // The reason why the device cannot be used; empty: it can.
  [[nodiscard]] const std::string& why() const { return why_; }
  // Throws std::runtime_error if the pool's device cannot be used.
  [[nodiscard]] const std::shared_ptr<gpu::Device>& device() const;
  [[nodiscard]] const Token& token() const { return token_; }
  // Writes the handles from which a peer makes its CudaPeer.
  void put(class Writer& writer) const;
  [[nodiscard]] const Pool& pool() const { return pool_; }

  // Any thread. Returns the value of `released` once the work now in the stream has ended. Throws gpu::Error.
  [[nodiscard]] std::uint64_t release_after(std::uint64_t stream);
  [[nodiscard]] std::uint64_t released_address() const;

  // Returns nothing if all are taken.
  [[nodiscard]] std::optional<std::uint32_t> take_epoch();
  [[nodiscard]] std::uint64_t epoch_is(std::uint32_t epoch) const { return epochs_[epoch]; }
  // Changes the epoch for all peers that read under it. Throws gpu::Error.
  void end_epoch(std::uint32_t epoch);

  [[nodiscard]] std::uint64_t proof_address() const { return control_->address(); }
  [[nodiscard]] std::uint64_t landing_address() const;
  // A place of kProofBytes zeros for a proof. Throws std::runtime_error if all are taken.
  [[nodiscard]] std::uint64_t take_landing();
  void rest_landing(std::uint64_t place) { free_landings_.push_back(place); }

  // Zeroed memory that one peer may write into. It is reused only when no kernel of an earlier peer can still write
  // there, and freed with the pool, even while a peer still maps it. Throws gpu::Error.
  [[nodiscard]] std::unique_ptr<gpu::Memory> take_window(std::uint64_t bytes);
  void rest_window(std::unique_ptr<gpu::Memory> window);

 private:
  void share(const FabricOptions& options);

  const Pool pool_;
  std::shared_ptr<gpu::Device> device_;
  std::string why_;
  Token token_ = make_token();
  std::unique_ptr<gpu::Memory> control_;
  BatonGpuHandle control_handle_{};
  std::vector<BatonGpuHandle> allocations_;
  std::vector<std::uint32_t> allocation_of_;  // Allocation of each layer.
  RemotePool offsets_;                        // Offsets of the layers within their allocations.
  std::mutex mutex_;
  std::uint64_t released_ = 0;  // Guarded by the mutex.
  std::vector<std::uint64_t> epochs_;
  std::vector<std::uint32_t> free_epochs_;
  std::vector<std::uint64_t> free_landings_;
  struct Resting {
    std::unique_ptr<gpu::Memory> window;
    Clock::time_point until;
  };
  std::deque<Resting> resting_;
};

// A source's pool and words, mapped into this process.
class CudaPeer {
 public:
  // Throws std::runtime_error if they cannot be mapped, or do not lie where the source says.
  CudaPeer(const CudaPool& own, class Reader& reader);

  [[nodiscard]] RemotePool pool() const { return pool_; }
  [[nodiscard]] std::uint64_t token_address() const { return control_.range().base; }
  [[nodiscard]] BatonGpuGate gate(const CudaGrant& grant) const;

 private:
  gpu::Mapping control_;
  std::vector<gpu::Mapping> allocations_;
  RemotePool pool_;
};

}  // namespace baton::transfer
