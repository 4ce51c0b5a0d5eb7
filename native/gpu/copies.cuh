// Copies between the host and the device: a stream for each direction, since GPUs have a copy engine for each.
//
// Streams have no priorities here: by CUDA's documentation these have no effect on such copies.
#pragma once

#include <deque>

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

}  // namespace

struct BatonGpuCopies {
  struct Lane {
    BatonGpuCopies* copies = nullptr;
    cudaStream_t stream = nullptr;
    std::mutex lock;
    std::deque<std::uint64_t> tickets;  // Of batches that have not ended, in their order; guarded by the lock.

    void pop(std::uint64_t& ticket) {
      const std::lock_guard held(lock);
      ticket = tickets.front();
      tickets.pop_front();
    }
  };

  BatonGpuCopies() = default;
  BatonGpuCopies(const BatonGpuCopies&) = delete;
  BatonGpuCopies& operator=(const BatonGpuCopies&) = delete;

  BatonGpu* gpu = nullptr;
  BatonGpuCopied copied = nullptr;
  void* context = nullptr;
  std::mutex lock;  // Batches start one after another.
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
  std::uint64_t ticket = 0;
  lane->pop(ticket);
  lane->copies->copied(lane->copies->context, ticket);
}

std::unique_ptr<BatonGpuCopies> open_copies(BatonGpu& gpu, BatonGpuCopied copied, void* context) {
  auto copies = std::make_unique<BatonGpuCopies>();
  copies->gpu = &gpu;
  copies->copied = copied;
  copies->context = context;
  for (auto& lane : copies->lanes) {
    lane.copies = copies.get();
    check(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking), "no stream");
  }
  return copies;
}

// Puts the copies into the stream, by one call where the driver has it.
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
  {
    const std::lock_guard held(lane.lock);
    lane.tickets.push_back(ticket);
  }
  try {
    enqueue_copies(batch, count, lane.stream);
    check(cudaLaunchHostFunc(lane.stream, &on_copied, &lane), "no copy");
  } catch (const Failure&) {
    // Copies that did start end before their caller hears of it.
    cudaStreamSynchronize(lane.stream);
    const std::lock_guard held(lane.lock);
    lane.tickets.pop_back();
    throw;
  }
}

}  // namespace
