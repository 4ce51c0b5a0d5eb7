#include "transfer/cuda_pool.h"

#include <algorithm>
#include <stdexcept>

#include "transfer/wire.h"

namespace baton::transfer {
namespace {

constexpr std::uint64_t kReleasedAt = sizeof(Token);
constexpr std::uint64_t kEpochsAt = 64;
constexpr std::uint32_t kEpochs = 65536;  // Largest number of pulls at a time: one for each possible lease.
constexpr std::uint64_t kWordsBytes = kEpochsAt + kEpochs * sizeof(std::uint64_t);
constexpr std::uint64_t kLandingsAt = (kWordsBytes / CudaPool::kProofBytes + 1) * CudaPool::kProofBytes;
// A page of the GPU's: smaller memory shares one with other memory, of which a dma-buf cannot be made.
constexpr std::uint64_t kControlBytes = 2 << 20;
static_assert(kLandingsAt + CudaPool::kLandings * CudaPool::kProofBytes <= kControlBytes);
constexpr std::chrono::seconds kRest(2);  // Many times as long as a launch takes.
constexpr const char* kSenseless = "the source's offer makes no sense";

using HandleBytes = std::array<std::uint8_t, sizeof(BatonGpuHandle)>;

}  // namespace

void put_handle(Writer& writer, const BatonGpuHandle& handle) {
  HandleBytes bytes;
  std::copy(std::begin(handle.bytes), std::end(handle.bytes), bytes.begin());
  writer.put(bytes);
}

BatonGpuHandle get_handle(Reader& reader) {
  HandleBytes bytes{};
  reader.get(bytes);
  BatonGpuHandle handle;
  std::copy(bytes.begin(), bytes.end(), std::begin(handle.bytes));
  return handle;
}

void CudaGrant::put(Writer& writer) const {
  writer.put(released);
  writer.put(epoch);
  writer.put(epoch_is);
}

void CudaGrant::get(Reader& reader) {
  reader.get(released);
  reader.get(epoch);
  reader.get(epoch_is);
}

std::vector<BatonGpuPiece> cuda_pieces(const Pool& pool, std::uint32_t layer, std::span<const std::uint32_t> blocks,
                                       std::uint64_t dense) {
  std::vector<BatonGpuPiece> pieces;
  std::uint64_t position = 0;
  for (const iovec& piece : pool.pieces(layer, blocks)) {
    pieces.push_back({.from = reinterpret_cast<std::uint64_t>(piece.iov_base),
                      .to = dense == 0 ? 0 : dense + position,
                      .row_bytes = static_cast<std::uint32_t>(piece.iov_len),
                      .rows = 1,
                      .groups = 1,
                      .position = position});
    position += piece.iov_len;
  }
  return pieces;
}

// ---------------------------------------------------------------- this side

CudaPool::CudaPool(const FabricOptions& options, const Pool& pool) : pool_(pool) {
  try {
    share(options);
  } catch (const std::runtime_error& error) {
    why_ = error.what();
    device_ = nullptr;
  }
}

void CudaPool::share(const FabricOptions& options) {
  if (pool_.device < 0) throw std::runtime_error("the pool lies in host memory");
  device_ = std::make_shared<gpu::Device>(options.gpu_library, pool_.device);
  offsets_ = {.stride_bytes = pool_.stride_bytes, .blocks = pool_.blocks};
  std::vector<gpu::Device::Range> ranges;
  for (const std::uint8_t* layer : pool_.layers) {
    const auto address = reinterpret_cast<std::uint64_t>(layer);
    const gpu::Device::Range range = device_->range(address);
    if (!range.holds(address, pool_.layer_bytes())) {
      throw std::runtime_error("a layer is not whole in memory of GPU " + std::to_string(pool_.device));
    }
    if ((address | pool_.stride_bytes | pool_.block_bytes) % BATON_GPU_ALIGN != 0) {
      throw std::runtime_error("blocks are not made of whole, aligned 16 bytes");
    }
    const auto known = std::ranges::find(ranges, range.base, &gpu::Device::Range::base);
    allocation_of_.push_back(static_cast<std::uint32_t>(known - ranges.begin()));
    if (known == ranges.end()) {
      ranges.push_back(range);
      allocations_.push_back(device_->share(range.base));
    }
    offsets_.layers.push_back(address - range.base);
  }
  control_ = std::make_unique<gpu::Memory>(device_, kControlBytes);
  control_handle_ = device_->share(control_->address());
  device_->fill(control_->address(), 0, kControlBytes);
  device_->copy(control_->address(), reinterpret_cast<std::uint64_t>(token_.data()), token_.size());
  epochs_.assign(kEpochs, 0);
  for (std::uint32_t epoch = kEpochs; epoch-- > 0;) free_epochs_.push_back(epoch);
  for (std::uint32_t i = 0; i < kLandings; ++i) free_landings_.push_back(landing_address() + i * kProofBytes);
}

const std::shared_ptr<gpu::Device>& CudaPool::device() const {
  if (device_ == nullptr) throw std::runtime_error(why_);
  return device_;
}

void CudaPool::put(Writer& writer) const {
  put_handle(writer, control_handle_);
  writer.put(static_cast<std::uint32_t>(allocations_.size()));
  for (const BatonGpuHandle& handle : allocations_) put_handle(writer, handle);
  for (const std::uint32_t allocation : allocation_of_) writer.put(allocation);
  offsets_.put(writer);
}

std::uint64_t CudaPool::released_address() const {
  return control_->address() + kReleasedAt;
}

std::uint64_t CudaPool::landing_address() const {
  return control_->address() + kLandingsAt;
}

std::uint64_t CudaPool::take_landing() {
  if (free_landings_.empty()) throw std::runtime_error("too many peers prove their access at once");
  const std::uint64_t place = free_landings_.back();
  device_->fill(place, 0, kProofBytes);  // An earlier connection may have left the same source's token there.
  free_landings_.pop_back();
  return place;
}

std::uint64_t CudaPool::release_after(std::uint64_t stream) {
  const auto& usable = device();
  const std::lock_guard lock(mutex_);
  usable->write_after(stream, released_address(), released_ + 1);
  return ++released_;
}

std::optional<std::uint32_t> CudaPool::take_epoch() {
  if (free_epochs_.empty()) return std::nullopt;
  const std::uint32_t epoch = free_epochs_.back();
  free_epochs_.pop_back();
  return epoch;
}

void CudaPool::end_epoch(std::uint32_t epoch) {
  free_epochs_.push_back(epoch);
  device_->write(control_->address() + kEpochsAt + epoch * sizeof(std::uint64_t), ++epochs_[epoch]);
}

std::unique_ptr<gpu::Memory> CudaPool::take_window(std::uint64_t bytes) {
  std::unique_ptr<gpu::Memory> window;
  if (!resting_.empty() && resting_.front().until <= Clock::now() && resting_.front().window->bytes() == bytes) {
    window = std::move(resting_.front().window);
    resting_.pop_front();
  } else {
    window = std::make_unique<gpu::Memory>(device_, bytes);
  }
  device_->fill(window->address(), 0, bytes);
  return window;
}

void CudaPool::rest_window(std::unique_ptr<gpu::Memory> window) {
  resting_.push_back({std::move(window), Clock::now() + kRest});
}

// ---------------------------------------------------------------- the other side

CudaPeer::CudaPeer(const CudaPool& own, Reader& reader) : control_(*own.device(), get_handle(reader)) {
  std::uint32_t count = 0;
  reader.get(count);
  const std::size_t layers = own.pool().layers.size();
  if (count == 0 || count > layers || control_.range().bytes < kWordsBytes) throw std::runtime_error(kSenseless);
  for (std::uint32_t i = 0; i < count; ++i) allocations_.emplace_back(*own.device(), get_handle(reader));
  std::vector<std::uint32_t> allocation_of(layers);
  for (std::uint32_t& allocation : allocation_of) reader.get(allocation);
  auto offsets = RemotePool::get(reader, own.pool());
  if (!offsets || !reader.finished()) throw std::runtime_error(kSenseless);
  pool_ = std::move(*offsets);
  // Every block must lie in what was mapped: a kernel that reads elsewhere ends this process's use of the GPU.
  for (std::size_t layer = 0; layer < layers; ++layer) {
    std::uint64_t& offset = pool_.layers[layer];
    if (allocation_of[layer] >= count || (offset | pool_.stride_bytes) % BATON_GPU_ALIGN != 0) {
      throw std::runtime_error(kSenseless);
    }
    const gpu::Device::Range& range = allocations_[allocation_of[layer]].range();
    if (!pool_.fits(offset, range.bytes, own.pool().block_bytes)) throw std::runtime_error(kSenseless);
    offset += range.base;
  }
}

BatonGpuGate CudaPeer::gate(const CudaGrant& grant) const {
  const std::uint64_t control = control_.range().base;
  return {.release = grant.released == 0 ? 0 : control + kReleasedAt,
          .release_min = grant.released,
          .epoch = control + kEpochsAt + grant.epoch % kEpochs * sizeof(std::uint64_t),
          .epoch_is = grant.epoch_is};
}

}  // namespace baton::transfer
