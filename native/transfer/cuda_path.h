// Code shared by the data paths through CUDA memory: chunks wait, go together in one launch, and end by its results.
#pragma once

#include <list>
#include <map>

#include "transfer/cuda_pool.h"

namespace baton::transfer {

// Throws std::runtime_error if this agent has no usable one.
[[nodiscard]] CudaPool& cuda_pool(const Site& site);
// Prepares the state that these backends keep per agent.
void prepare_cuda(const FabricOptions& options, const Pool& pool, Fabrics& fabrics);
// Makes one end of a path. Returns null, with the reason in `why`, if its constructor throws.
template <class Path, class... Arguments>
[[nodiscard]] std::unique_ptr<DataPath> try_cuda(std::string& why, Arguments&&... arguments) {
  try {
    return std::make_unique<Path>(std::forward<Arguments>(arguments)...);
  } catch (const std::runtime_error& error) {
    why = error.what();
    return nullptr;
  }
}

// The source's end: the device handles each chunk before the sink is notified.
class CudaServing : public DataPath {
 public:
  explicit CudaServing(const Site& site) : site_(site), cuda_(cuda_pool(site)), queue_(*cuda_.device()) {}
  void use(bool checksum) override { checksum_ = checksum; }
  void serve(const Serve& chunk) override { waiting_.push_back({.chunk = chunk}); }
  void stop_serving(PullId pull) override;
  bool place(const Place&) override { return false; }
  void stop_placing(PullId) override {}
  Turn advance() override;
  int fd() const override { return queue_.fd(); }
  std::string why() const override { return why_; }

 protected:
  struct Serving {
    Serve chunk;
    std::int32_t slot = -1;
    bool stopped = false;
    std::list<Serving>::iterator self{};
  };

  enum class Way : std::uint8_t { later, device, served };
  // Decides whether the device moves the chunk, and where to.
  [[nodiscard]] virtual Way direct(Serving& serving, BatonGpuGate& gate, std::uint64_t& dense) = 0;
  virtual void served(const Serving& serving, std::uint32_t sum) = 0;
  // A directed chunk was not moved.
  virtual void dropped(const Serving&) {}
  // A launch without a chunk has ended.
  virtual void proven() {}

  Site site_;
  CudaPool& cuda_;
  bool checksum_ = true;

 private:
  void judge(const gpu::Queue::Ended& ended);
  void begin_all();

  // Bounded by what the core accepts per pull.
  std::list<Serving> waiting_;
  std::list<Serving> moving_;
  std::vector<gpu::Queue::Ended> ended_;
  std::string why_;

 protected:
  gpu::Queue queue_;  // Destroyed first: until then kernels may use the rest.
};

static_assert(sizeof(Token) <= BATON_GPU_SCRATCH_BYTES);

// The sink's end: the device writes chunks into the sink's blocks.
class CudaPlacing : public ReadingSink {
 public:
  CudaPlacing(const Site& site, RemotePool remote) : ReadingSink(site, std::move(remote)), cuda_(cuda_pool(site)) {}
  std::optional<Blob> proof() const override;
  Turn advance() override;
  int fd() const override { return queue_.fd(); }
  std::string why() const override { return why_; }

 protected:
  [[nodiscard]] virtual BatonGpuGate gate_of(const Read& read) = 0;
  // Begins to read the source's token in the same way as chunks.
  void prove(std::uint64_t token_address, const BatonGpuGate& gate);
  bool poll() override;
  bool begin(Read& read) override;
  std::uint32_t sum_of(const Read& read) const override { return read.sum; }

  CudaPool& cuda_;

 private:
  std::optional<Token> token_;
  std::vector<gpu::Queue::Ended> ended_;
  BatonGpuGate proof_gate_{};
  std::uint64_t proof_address_ = 0;
  std::string why_;

 protected:
  gpu::Queue queue_{*cuda_.device()};  // Destroyed first: it is the fence.
};

}  // namespace baton::transfer
