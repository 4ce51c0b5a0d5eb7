// Copies between the host and the device: a stream for each direction.
//
// Small copies are made by a kernel that reads or writes the host's memory over the bus, which few CTAs fill: a copy
// engine needs too long for each. Large copies are the copy engine's, which leaves the multiprocessors alone. The
// figures are in docs/decisions/0048-copies-between-host-and-device.md.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "gpu/move.cuh"
#include "gpu/runtime.cuh"

namespace {

// CUmemcpyAttributes, which headers before CUDA 12.8 lack.
struct BatchAttributes {
  unsigned source_order;
  struct {
    unsigned type;
    int id;
  } source, destination;
  unsigned flags;
};
#if CUDART_VERSION >= 12080
static_assert(sizeof(BatchAttributes) == sizeof(cudaMemcpyAttributes) &&
              offsetof(BatchAttributes, flags) == offsetof(cudaMemcpyAttributes, flags));
#endif
constexpr unsigned kSourceInStreamOrder = 1;
constexpr unsigned kBesideComputation = 1;

// The driver's call for a whole batch, since CUDA 12.8; that of CUDA 13 lost a parameter. Both are null before.
struct BatchCall {
  int (*of_13)(unsigned long long* to, unsigned long long* from, std::size_t* bytes, std::size_t count,
               BatchAttributes* attributes, std::size_t* first, std::size_t attribute_count, cudaStream_t stream);
  int (*of_12)(unsigned long long* to, unsigned long long* from, std::size_t* bytes, std::size_t count,
               BatchAttributes* attributes, std::size_t* first, std::size_t attribute_count, std::size_t* failed,
               cudaStream_t stream);
};

const BatchCall& batch_call() {
  static const auto found = [] {
    BatchCall calls{};
    if (void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
      calls.of_13 = reinterpret_cast<decltype(calls.of_13)>(::dlsym(library, "cuMemcpyBatchAsync_v2"));
      calls.of_12 = reinterpret_cast<decltype(calls.of_12)>(::dlsym(library, "cuMemcpyBatchAsync"));
    }
    return calls;
  }();
  return found;
}

constexpr std::uint64_t kKernelBytesMax = 256 << 10;  // Mean size of copies from which the copy engine is faster.
constexpr std::uint32_t kUnitBytes = 16 << 10;        // Small, so that all CTAs end at about the same time.
constexpr std::uint32_t kUnitsMax = 8192;             // Of a launch.
constexpr std::uint32_t kCopyCtas = 32;               // They fill PCIe 5.0.

// One launch's copies, each of `kUnitBytes` at most, on both sides.
struct Units {
  Units() = default;
  Units(const Units&) = delete;
  Units& operator=(const Units&) = delete;
  ~Units() {
    cudaFreeHost(host);
    cudaFree(device);
  }
  BatonGpuCopy* host = nullptr;
  BatonGpuCopy* device = nullptr;
  std::uint32_t count = 0;
};
using UnitsList = std::vector<std::unique_ptr<Units>>;

__global__ void __launch_bounds__(baton::gpu::kThreads) copy_units(const BatonGpuCopy* units, std::uint32_t count) {
  for (std::uint32_t unit = blockIdx.x; unit < count; unit += gridDim.x) {
    const BatonGpuPiece piece{.from = units[unit].from, .to = units[unit].to};
    baton::gpu::move_words<false, true>(piece, 0, units[unit].bytes / baton::gpu::kVecBytes);
  }
}

}  // namespace

struct BatonGpuCopies {
  struct Batch {
    std::uint64_t ticket = 0;
    UnitsList units;
  };
  struct Lane {
    BatonGpuCopies* copies = nullptr;
    cudaStream_t stream = nullptr;
    std::mutex lock;            // Guards the rest.
    std::deque<Batch> batches;  // Those that have not ended, in their order.
    UnitsList idle;

    // Ends the first batch; returns its ticket.
    std::uint64_t pop() {
      const std::lock_guard held(lock);
      const std::uint64_t ticket = batches.front().ticket;
      std::ranges::move(batches.front().units, std::back_inserter(idle));
      batches.pop_front();
      return ticket;
    }
  };

  BatonGpuCopies() = default;
  BatonGpuCopies(const BatonGpuCopies&) = delete;
  BatonGpuCopies& operator=(const BatonGpuCopies&) = delete;

  BatonGpu* gpu = nullptr;
  BatonGpuCopied copied = nullptr;
  void* context = nullptr;
  bool reaches_host = false;  // Whether kernels use pinned memory by the host's addresses.
  std::mutex lock;            // Batches start one after another.
  std::array<Lane, 2> lanes;

  ~BatonGpuCopies() {
    for (Lane& lane : lanes) {
      if (lane.stream == nullptr) continue;
      cudaStreamSynchronize(lane.stream);
      cudaStreamDestroy(lane.stream);
    }
  }
};

namespace {

// Runs on the driver's thread and must not call CUDA.
void CUDART_CB on_copied(void* self) {
  auto* const lane = static_cast<BatonGpuCopies::Lane*>(self);
  const std::uint64_t ticket = lane->pop();
  lane->copies->copied(lane->copies->context, ticket);
}

std::unique_ptr<Units> make_units() {
  auto units = std::make_unique<Units>();
  constexpr std::size_t bytes = kUnitsMax * sizeof(BatonGpuCopy);
  check(cudaHostAlloc(reinterpret_cast<void**>(&units->host), bytes, cudaHostAllocDefault), "no pinned memory");
  check(cudaMalloc(reinterpret_cast<void**>(&units->device), bytes), "no device memory");
  return units;
}

std::unique_ptr<BatonGpuCopies> open_copies(BatonGpu& gpu, BatonGpuCopied copied, void* context) {
  auto copies = std::make_unique<BatonGpuCopies>();
  copies->gpu = &gpu;
  copies->copied = copied;
  copies->context = context;
  int reaches_host = 0;
  check(cudaDeviceGetAttribute(&reaches_host, cudaDevAttrCanUseHostPointerForRegisteredMem, gpu.device),
        "the GPU does not say what it is");
  copies->reaches_host = reaches_host != 0;
  // Loads the kernel, as `warm_up` does with the others.
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, copy_units), "the kernel cannot be used");
  for (auto& lane : copies->lanes) {
    lane.copies = copies.get();
    lane.stream = make_urgent_stream();
    lane.idle.push_back(make_units());
  }
  return copies;
}

// Whether a kernel is the faster way, and can go it: it must not touch memory that is not there, since that would end
// this process's use of the GPU.
bool suits_kernel(const BatonGpuCopies& copies, BatonGpuDirection direction, const BatonGpuCopy* batch,
                  std::uint32_t count) {
  if (!copies.reaches_host) return false;
  std::uint64_t total = 0, base = 0, bytes = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    const BatonGpuCopy& copy = batch[i];
    if ((copy.to | copy.from | copy.bytes) % BATON_GPU_ALIGN != 0) return false;
    const std::uint64_t address = direction == BATON_GPU_TO_HOST ? copy.from : copy.to;
    if (address - base >= bytes) copies.gpu->range(address, base, bytes);
    if (copy.bytes > bytes - (address - base)) return false;
    total += copy.bytes;
  }
  return total < kKernelBytesMax * count;
}

void launch_units(Units& units, cudaStream_t stream) {
  check(cudaMemcpyAsync(units.device, units.host, units.count * sizeof(BatonGpuCopy), cudaMemcpyHostToDevice, stream),
        "no copy");
  copy_units<<<std::min(units.count, kCopyCtas), baton::gpu::kThreads, 0, stream>>>(units.device, units.count);
  check(cudaGetLastError(), "the kernel does not start");
}

// Moves the copies by a kernel; `used` is kept until they have ended.
void enqueue_kernel(BatonGpuCopies::Lane& lane, const BatonGpuCopy* batch, std::uint32_t count, UnitsList& used) {
  for (std::uint32_t i = 0; i < count; ++i) {
    for (std::uint64_t at = 0; at < batch[i].bytes; at += kUnitBytes) {
      if (used.empty() || used.back()->count == kUnitsMax) {
        if (!used.empty()) launch_units(*used.back(), lane.stream);
        auto idle = take_idle(lane.lock, lane.idle);
        used.push_back(idle != nullptr ? std::move(idle) : make_units());
        used.back()->count = 0;
      }
      Units& units = *used.back();
      units.host[units.count++] = {batch[i].to + at, batch[i].from + at,
                                   std::min<std::uint64_t>(kUnitBytes, batch[i].bytes - at)};
    }
  }
  launch_units(*used.back(), lane.stream);
}

// Puts the copies into the stream for the copy engine, by one call where the driver has it.
void enqueue_copies(const BatonGpuCopy* batch, std::uint32_t count, cudaStream_t stream) {
  const BatchCall& call = batch_call();
  if (call.of_13 == nullptr && call.of_12 == nullptr) {
    for (std::uint32_t i = 0; i < count; ++i) {
      check(cudaMemcpyAsync(as_pointer(batch[i].to), as_pointer(batch[i].from), batch[i].bytes, cudaMemcpyDefault,
                            stream),
            "no copy");
    }
    return;
  }
  std::vector<unsigned long long> to(count), from(count);
  std::vector<std::size_t> bytes(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    to[i] = batch[i].to;
    from[i] = batch[i].from;
    bytes[i] = batch[i].bytes;
  }
  BatchAttributes attributes{.source_order = kSourceInStreamOrder, .flags = kBesideComputation};
  std::size_t first = 0, failed = 0;
  const int error =
      call.of_13 != nullptr
          ? call.of_13(to.data(), from.data(), bytes.data(), count, &attributes, &first, 1, stream)
          : call.of_12(to.data(), from.data(), bytes.data(), count, &attributes, &first, 1, &failed, stream);
  if (error != 0)
    throw Failure{BATON_GPU_FAILED, "the batch of copies is refused: CUDA error " + std::to_string(error)};
}

void start_copies(BatonGpuCopies& copies, std::uint64_t ticket, BatonGpuDirection direction, const BatonGpuCopy* batch,
                  std::uint32_t count, bool ordered, std::uint64_t after) {
  const std::lock_guard starting(copies.lock);
  BatonGpuCopies::Lane& lane = copies.lanes[direction == BATON_GPU_TO_HOST ? 0 : 1];
  if (ordered) wait_for_stream(lane.stream, after);
  UnitsList used;
  bool noted = false;
  try {
    if (suits_kernel(copies, direction, batch, count)) {
      enqueue_kernel(lane, batch, count, used);
    } else {
      enqueue_copies(batch, count, lane.stream);
    }
    {
      const std::lock_guard held(lane.lock);
      lane.batches.push_back({ticket, std::move(used)});
      noted = true;
    }
    check(cudaLaunchHostFunc(lane.stream, &on_copied, &lane), "no copy");
  } catch (const Failure&) {
    // Copies that did start end before their caller hears of it.
    cudaStreamSynchronize(lane.stream);
    const std::lock_guard held(lane.lock);
    if (noted) lane.batches.pop_back();
    throw;
  }
}

}  // namespace
