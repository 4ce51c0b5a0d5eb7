// One-sided the other way, as DeepEP does it: the source's GPU puts chunks into slots of the sink's, which it maps, and
// raises each slot's signal; the sink's GPU waits for the signal and scatters the slot into its blocks. Slots come back
// by credits.
//
//    window of one connection, in the sink's memory:  | token | its signal | epoch | signals of slots | slot 0 | slot 1
//    | …
//
//   source                                             sink
//    Offer()       ──▶                                  takes a window
//    maps it, puts a token there  ◀── Answer(window)
//    Offer()       ──▶                                  waits for the token's signal and reads it
//    compares      ◀── Answer(token)
//
// The sink's pool is never mapped by anybody: peers write into slots of their own window only, so no word of a peer is
// needed before blocks are given back. It costs a second copy within the sink's GPU, and brings large writes over the
// link in place of reads, and sums that the source takes in passing. The epoch changes when the sink has left.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "transfer/cuda_path.h"
#include "transfer/wire.h"

namespace baton::transfer {
namespace {

constexpr std::uint64_t kTokenSignalAt = sizeof(Token);
constexpr std::uint64_t kEpochAt = kTokenSignalAt + 8;
constexpr std::uint64_t kSignalsAt = 64;
constexpr std::uint32_t kSlotsMin = 2, kSlotsMax = 64;
constexpr std::uint64_t kHeaderBytes = 4096;
constexpr std::uint64_t kWindowBytes = 16 << 20;

std::uint64_t signal_at(std::uint64_t window, std::int32_t slot) {
  return window + kSignalsAt + static_cast<std::uint64_t>(slot) * sizeof(std::uint64_t);
}

// A base class, so that the memory that the path's kernels write into outlives them.
struct Used {
  std::optional<gpu::Mapping> window;
};

class CudaPutSource : private Used, public CudaServing {
 public:
  explicit CudaPutSource(const Site& site) : CudaServing(site) {
    cuda_.device()->copy(queue_.scratch(), reinterpret_cast<std::uint64_t>(proof_.data()), sizeof(Token));
  }
  bool check(const Blob& answer) override {
    if (window) {
      proven_ = answer == Blob(proof_.begin(), proof_.end());
      return proven_;
    }
    try {
      connect(answer);
      return true;
    } catch (const std::runtime_error&) {
      return false;  // The next way is tried, as after a wrong token.
    }
  }
  bool has_more_to_offer() const override { return window && !proven_; }
  bool credit(std::int32_t slot) override {
    const bool is_slot = slot >= 0 && slot < static_cast<std::int32_t>(announced_.size());
    if (!is_slot || std::ranges::find(free_, slot) != free_.end()) return false;
    free_.push_back(slot);
    return true;
  }

 protected:
  Way direct(Serving& serving, BatonGpuGate& gate, std::uint64_t& dense) override {
    if (serving.slot < 0) {
      if (free_.empty()) return Way::later;
      serving.slot = free_.back();
      free_.pop_back();
    }
    const std::uint64_t base = window->range().base;
    gate.epoch = base + kEpochAt;
    gate.signal = signal_at(base, serving.slot);
    gate.signal_is = announced_[serving.slot] + 1;
    dense = base + kHeaderBytes + static_cast<std::uint64_t>(serving.slot) * slot_bytes_;
    return Way::device;
  }
  void served(const Serving& serving, std::uint32_t sum) override {
    ++announced_[serving.slot];
    const Serve& chunk = serving.chunk;
    site_.happened.push_back(Served{site_.connection, chunk.pull, chunk.sequence, serving.slot, sum});
  }
  // The sink never hears of it, so the next chunk in this slot has the same number.
  void dropped(const Serving& serving) override {
    if (serving.slot >= 0) free_.push_back(serving.slot);
  }

 private:
  void connect(const Blob& answer) {
    Reader reader(answer);
    const BatonGpuHandle handle = get_handle(reader);
    std::uint32_t slots = 0;
    reader.get(slots);
    reader.get(slot_bytes_);
    gpu::Mapping mapping(*cuda_.device(), handle);
    const std::uint64_t bytes = mapping.range().bytes;
    if (!reader.finished() || slots < kSlotsMin || slots > kSlotsMax || slot_bytes_ < site_.chunk_bytes_max ||
        slot_bytes_ % BATON_GPU_ALIGN != 0 || bytes < kHeaderBytes || slot_bytes_ > (bytes - kHeaderBytes) / slots) {
      throw std::runtime_error("the sink's window makes no sense");
    }
    const std::uint64_t to = window.emplace(std::move(mapping)).range().base;
    announced_.assign(slots, 0);
    for (auto slot = static_cast<std::int32_t>(slots); slot-- > 0;) free_.push_back(slot);
    const BatonGpuPiece piece{.from = queue_.scratch(), .to = to, .row_bytes = sizeof(Token), .rows = 1, .groups = 1};
    queue_.add({.signal = to + kTokenSignalAt, .signal_is = 1}, {&piece, 1}, nullptr);
    queue_.launch(false);
  }

  const Token proof_ = make_token();
  std::uint64_t slot_bytes_ = 0;
  std::vector<std::uint64_t> announced_;  // Per slot.
  std::vector<std::int32_t> free_;
  bool proven_ = false;
};

class CudaPutSink : public CudaPlacing {
 public:
  explicit CudaPutSink(const Site& site) : CudaPlacing(site, {}) {
    slot_bytes_ = (site.chunk_bytes_max + BATON_GPU_ALIGN - 1) / BATON_GPU_ALIGN * BATON_GPU_ALIGN;
    placed_.resize(std::clamp<std::uint64_t>(kWindowBytes / slot_bytes_, kSlotsMin, kSlotsMax));
    window_ = cuda_.take_window(kHeaderBytes + placed_.size() * slot_bytes_);
    handle_ = cuda_.device()->share(window_->address());
  }
  ~CudaPutSink() override {
    try {
      cuda_.device()->write(window_->address() + kEpochAt, 1);
    } catch (const std::runtime_error&) {
      // The device has failed: nothing is written there.
    }
    cuda_.rest_window(std::move(window_));
  }
  std::optional<Blob> proof() const override {
    if (resumed_) return CudaPlacing::proof();
    Blob blob;
    Writer writer(blob);
    put_handle(writer, handle_);
    writer.put(static_cast<std::uint32_t>(placed_.size()));
    writer.put(slot_bytes_);
    return blob;
  }
  bool resume(const Blob&) override {
    if (std::exchange(resumed_, true)) return false;
    prove(window_->address(), {.release = window_->address() + kTokenSignalAt, .release_min = 1});
    return true;
  }

 protected:
  bool match(const Place& chunk, Pieces& pieces) override {
    if (chunk.slot < 0 || chunk.slot >= static_cast<std::int32_t>(placed_.size())) return false;
    ++placed_[chunk.slot];
    pieces.local = site_.pool.pieces(chunk.layer, chunk.blocks);
    std::uint64_t from = window_->address() + kHeaderBytes + static_cast<std::uint64_t>(chunk.slot) * slot_bytes_;
    for (const iovec& piece : pieces.local) {
      pieces.remote.push_back({reinterpret_cast<void*>(from), piece.iov_len});
      from += piece.iov_len;
    }
    return true;
  }
  BatonGpuGate gate_of(const Read& read) override {
    return {.release = signal_at(window_->address(), read.chunk.slot), .release_min = placed_[read.chunk.slot]};
  }

 private:
  std::unique_ptr<gpu::Memory> window_;
  BatonGpuHandle handle_{};
  std::uint64_t slot_bytes_ = 0;
  std::vector<std::uint64_t> placed_;  // Per slot: number of chunks that the source has announced.
  bool resumed_ = false;
};

std::unique_ptr<DataPath> at_source(const Site& site, std::string& why) {
  return try_cuda<CudaPutSource>(why, site);
}

std::unique_ptr<DataPath> at_sink(const Site& site, const Blob& offer, std::string& why) {
  if (offer.empty()) return try_cuda<CudaPutSink>(why, site);
  why = "the source's offer makes no sense";
  return nullptr;
}

}  // namespace

const Backend kCudaPut{.name = "cuda-put",
                       .at_source = &at_source,
                       .at_sink = &at_sink,
                       .prepare = &prepare_cuda,
                       .device = true,
                       .local = true,
                       .fits = [](const Site& site) { return site.pool.device >= 0; }};

}  // namespace baton::transfer
