// One-sided in CUDA memory of one host: the sink's GPU reads the source's blocks, which it maps, over NVLink or within
// one GPU, and writes them into its own. No byte passes a host's processor.
//
// The source takes each chunk's sum on its GPU before it grants it (with checksums on); the sink's kernel sums what it
// moves. A grant names the release and the epoch that the kernel heeds (see cuda_pool.h); the trailer, with the lease's
// generation after the bytes were read, follows as for every one-sided way. Peers may map the pool for writing, as CUDA
// has no other kind: see docs/decisions/0013-gpus.md.
#include <stdexcept>

#include "transfer/cuda_path.h"
#include "transfer/wire.h"

namespace baton::transfer {
namespace {

class CudaIpcSource : public CudaServing {
 public:
  explicit CudaIpcSource(const Site& site) : CudaServing(site) {
    if (offer().size() > kBlobBytesMax)
      throw std::runtime_error("the handles of so many allocations do not fit a frame");
  }
  ~CudaIpcSource() override {
    for (const auto& [pull, epoch] : epochs_) end(epoch);
  }
  Blob offer() const override {
    Blob blob;
    Writer writer(blob);
    cuda_.put(writer);
    return blob;
  }
  bool check(const Blob& proof) override { return proof == Blob(cuda_.token().begin(), cuda_.token().end()); }
  void stop_serving(PullId pull) override {
    CudaServing::stop_serving(pull);
    const auto found = epochs_.find(pull);
    if (found == epochs_.end()) return;
    end(found->second);
    epochs_.erase(found);
  }

 protected:
  Way direct(Serving& serving, BatonGpuGate&, std::uint64_t&) override {
    if (checksum_) return Way::device;
    served(serving, 0);
    return Way::served;
  }
  void served(const Serving& serving, std::uint32_t sum) override {
    const Serve& chunk = serving.chunk;
    Blob where = where_of(chunk);
    Writer writer(where);
    const std::uint32_t epoch = epoch_of(chunk.pull);
    CudaGrant{.released = chunk.released, .epoch = epoch, .epoch_is = cuda_.epoch_is(epoch)}.put(writer);
    site_.happened.push_back(Granted{site_.connection, chunk.pull, chunk.sequence, sum, std::move(where)});
  }

 private:
  std::uint32_t epoch_of(PullId pull) {
    const auto found = epochs_.find(pull);
    if (found != epochs_.end()) return found->second;
    const auto epoch = cuda_.take_epoch();
    if (!epoch) throw std::runtime_error("too many pulls are served at once");
    return epochs_[pull] = *epoch;
  }
  void end(std::uint32_t epoch) noexcept {
    try {
      cuda_.end_epoch(epoch);
    } catch (const gpu::Error&) {
      // The device has failed, so nothing reads by this epoch; the next launch says so.
    }
  }

  std::map<PullId, std::uint32_t> epochs_;
};

// A base class, so that the mapping outlives its readers.
struct Seen {
  std::unique_ptr<CudaPeer> peer;
};

class CudaIpcSink : private Seen, public CudaPlacing {
 public:
  CudaIpcSink(const Site& site, std::unique_ptr<CudaPeer> seen)
      : Seen{std::move(seen)}, CudaPlacing(site, Seen::peer->pool()) {
    prove(Seen::peer->token_address(), {});
  }

 protected:
  bool match(const Place& chunk, Pieces& pieces) override {
    return pieces.match(chunk, site_.pool, remote_, CudaGrant::kBytes);
  }
  BatonGpuGate gate_of(const Read& read) override {
    const Blob& where = read.chunk.where;
    Reader reader(Bytes(where).subspan(where.size() - CudaGrant::kBytes));
    CudaGrant grant;
    grant.get(reader);
    return peer->gate(grant);
  }
};

std::unique_ptr<DataPath> at_source(const Site& site, std::string& why) {
  return try_cuda<CudaIpcSource>(why, site);
}

std::unique_ptr<DataPath> at_sink(const Site& site, const Blob& offer, std::string& why) {
  try {
    Reader reader(offer);
    auto peer = std::make_unique<CudaPeer>(cuda_pool(site), reader);
    return try_cuda<CudaIpcSink>(why, site, std::move(peer));
  } catch (const std::runtime_error& error) {
    why = error.what();
    return nullptr;
  }
}

}  // namespace

const Backend kCudaIpc{.name = "cuda-ipc",
                       .at_source = &at_source,
                       .at_sink = &at_sink,
                       .prepare = &prepare_cuda,
                       .device = true,
                       .local = true,
                       .fits = [](const Site& site) { return site.pool.device >= 0; }};

}  // namespace baton::transfer
