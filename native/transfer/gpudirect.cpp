// One-sided through RDMA adapters in CUDA memory (GPUDirect RDMA): the sink's adapter reads the source's GPU, and
// writes into the sink's. No byte passes host memory or a processor.
//
//   source                                              sink
//    its GPU waits for the release and sums the chunk
//    Granted(where, sum)  ──▶                            its adapter reads
//                                                        waits until the GPU sees what the adapter wrote
//                                                        its GPU sums the blocks
//    Trailer  ◀── Fetched, ──▶ compared with the sum
//
// An adapter waits for no stream, so a chunk is granted once its release is reached on the source's GPU. The handshake
// is that of `verbs`, its proof is read from GPU to GPU. See docs/decisions/0068-adapters-read-gpus.md.
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "transfer/cuda_path.h"
#include "transfer/verbs_path.h"
#include "transfer/wire.h"

namespace baton::transfer {
namespace {

void prepare(const FabricOptions& options, const Pool& pool, Fabrics& fabrics) {
  prepare_cuda(options, pool, fabrics);
  if (fabrics.cuda->why().empty()) fabrics.verbs = std::make_shared<VerbsDevices>(options, pool, fabrics.cuda.get());
}

// Throws std::runtime_error where the GPU's memory cannot be used by adapters.
VerbsDevices& devices(const Site& site) {
  cuda_pool(site).device()->flush();  // Without this nothing that adapters write could be used.
  return verbs_devices(site);
}

class GpuDirectSource : public CudaServing {
 public:
  GpuDirectSource(const Site& site, VerbsDevice& device)
      : CudaServing(site),
        server_(site, device, *device.proof, cuda_.proof_address(), Blob(cuda_.token().begin(), cuda_.token().end())) {}

  Blob offer() const override { return server_.offer(); }
  bool check(const Blob& answer) override { return server_.check(answer); }
  bool has_more_to_offer() const override { return server_.has_more_to_offer(); }

 protected:
  Way direct(Serving& serving, BatonGpuGate&, std::uint64_t&) override {
    if (checksum_ || serving.chunk.released != 0) return Way::device;
    served(serving, 0);
    return Way::served;
  }
  void served(const Serving& serving, std::uint32_t sum) override {
    const Serve& chunk = serving.chunk;
    site_.happened.push_back(Granted{site_.connection, chunk.pull, chunk.sequence, sum, where_of(chunk)});
  }

 private:
  VerbsServer server_;
};

// A place in the GPU's memory for the source's proof. A base class, so that it outlives the queue pair that writes
// there and into the pool.
class Landing {
 public:
  explicit Landing(CudaPool& cuda) : cuda_(cuda), place_(cuda.take_landing()) {}
  ~Landing() {
    try {
      cuda_.device()->flush();
    } catch (const gpu::Error&) {
      // The device has failed; nobody reads what was written.
    }
    rest();
  }
  Landing(const Landing&) = delete;
  Landing& operator=(const Landing&) = delete;

  [[nodiscard]] iovec range() const { return {reinterpret_cast<void*>(place_), CudaPool::kProofBytes}; }
  // The token that was read. The place is another connection's afterwards.
  [[nodiscard]] Blob take_token() {
    Blob token(sizeof(Token));
    cuda_.device()->copy(reinterpret_cast<std::uint64_t>(token.data()), place_, token.size());
    rest();
    return token;
  }

 private:
  void rest() {
    if (place_ != 0) cuda_.rest_landing(std::exchange(place_, 0));
  }

  CudaPool& cuda_;
  std::uint64_t place_;
};

// A descriptor that is readable while any of two is.
class EitherReadable {
 public:
  EitherReadable(int first, int second) : fd_(::epoll_create1(EPOLL_CLOEXEC)) {
    for (const int fd : {first, second}) {
      epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
      if (fd_ >= 0 && ::epoll_ctl(fd_, EPOLL_CTL_ADD, fd, &event) == 0) continue;
      const int error = errno;
      ::close(fd_);
      throw std::system_error(error, std::generic_category(), "no descriptor to wait with");
    }
  }
  ~EitherReadable() { ::close(fd_); }
  EitherReadable(const EitherReadable&) = delete;
  EitherReadable& operator=(const EitherReadable&) = delete;

  [[nodiscard]] int fd() const { return fd_; }

 private:
  int fd_;
};

class GpuDirectSink : private Landing, public VerbsSink {
 public:
  GpuDirectSink(const Site& site, VerbsOffer offer, VerbsDevice& device)
      : Landing(cuda_pool(site)),
        VerbsSink(site, std::move(offer), device, Landing::range(), *device.landing),
        gpu_(*cuda_pool(site).device()),
        sums_(gpu_),
        news_(VerbsSink::fd(), sums_.fd()) {}

  Turn advance() override {
    try {
      const Turn turn = VerbsSink::advance();
      while (!landed_.empty() && sums_.has_room(landed_.front()->pieces.local.size())) {
        Read& read = *landed_.front();
        sums_.add({}, cuda_pieces(site_.pool, read.chunk.layer, read.chunk.blocks, 0), &read);
        landed_.pop_front();
      }
      sums_.launch(true);
      return turn;
    } catch (const std::runtime_error& error) {
      why_ = error.what();
      return Turn::broken;
    }
  }
  int fd() const override { return news_.fd(); }
  std::string why() const override { return why_.empty() ? VerbsSink::why() : why_; }

 protected:
  void settle_writes() override { gpu_.flush(); }
  Blob token_read() override { return Landing::take_token(); }
  // The last pieces count once the whole chunk is summed.
  void landed(Read& read, std::size_t pieces) override {
    const bool whole = read.ended + pieces == read.pieces.local.size();
    if (!checksum_ || read.stopped || !whole) return ended(read, pieces);
    landed_.push_back(&read);
  }
  bool poll() override {
    if (!VerbsSink::poll()) return false;
    summed_.clear();
    sums_.take(summed_);
    for (const auto& [tag, result] : summed_) {
      Read& read = *static_cast<Read*>(tag);
      read.sum = result.sum;
      ended(read, read.begun - read.ended);
    }
    return true;
  }
  std::uint32_t sum_of(const Read& read) const override { return read.sum; }

 private:
  gpu::Device& gpu_;
  std::deque<Read*> landed_;  // Read whole, and not being summed yet.
  std::vector<gpu::Queue::Ended> summed_;
  std::string why_;
  gpu::Queue sums_;
  EitherReadable news_;
};

std::unique_ptr<DataPath> at_source(const Site& site, std::string& why) {
  try {
    return std::make_unique<GpuDirectSource>(site, devices(site).next());
  } catch (const std::runtime_error& error) {
    why = error.what();
    return nullptr;
  }
}

std::unique_ptr<DataPath> at_sink(const Site& site, const Blob& blob, std::string& why) {
  try {
    VerbsDevices& own = devices(site);
    auto offer = VerbsOffer::get(blob, site, why);
    if (!offer) return nullptr;
    VerbsDevice& device = own.of_rail(offer->rail);
    return std::make_unique<GpuDirectSink>(site, std::move(*offer), device);
  } catch (const std::runtime_error& error) {
    why = error.what();
    return nullptr;
  }
}

}  // namespace

const Backend kGpuDirect{.name = "gpudirect",
                         .at_source = &at_source,
                         .at_sink = &at_sink,
                         .striped = true,
                         .prepare = &prepare,
                         .device = true,
                         .fits = [](const Site& site) {
                           return site.pool.device >= 0 && site.fabrics.verbs != nullptr &&
                                  site.fabrics.verbs->present();
                         }};

}  // namespace baton::transfer
