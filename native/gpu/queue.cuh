// Launches: their descriptors, which go to the device in one copy, and their completion.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <utility>

#include "gpu/move.cuh"
#include "gpu/runtime.cuh"

namespace {

using namespace baton::gpu;

constexpr std::uint32_t kCtasPerProcessor = 4;  // Enough loads in flight to keep the memory busy.
constexpr std::uint64_t kPieceBytesMax = std::uint64_t{1} << 35;

// One launch's descriptors and results, on both sides; laid out so that each goes in one copy.
struct Slot {
  struct Content {
    GateState states[BATON_GPU_GATES_MAX];
    BatonGpuGate gates[BATON_GPU_GATES_MAX];
    std::uint32_t first_unit[BATON_GPU_PIECES_MAX];
    BatonGpuPiece pieces[BATON_GPU_PIECES_MAX];  // Last, so that only the pieces in use are copied.
    alignas(BATON_GPU_ALIGN) std::uint8_t scratch[BATON_GPU_SCRATCH_BYTES];
  };
  Content* host = nullptr;
  Content* device = nullptr;
  cudaEvent_t begun = nullptr, ended = nullptr;
  std::uint32_t gates = 0;
};

}  // namespace

struct BatonGpuQueue {
  BatonGpuQueue() = default;
  BatonGpuQueue(const BatonGpuQueue&) = delete;
  BatonGpuQueue& operator=(const BatonGpuQueue&) = delete;

  BatonGpu* gpu = nullptr;
  cudaStream_t stream = nullptr;
  std::uint32_t* stop = nullptr;  // Host memory that the device reads.
  int fd = -1;
  std::array<Slot, BATON_GPU_LAUNCHES_MAX> slots;
  std::uint64_t launched = 0, taken = 0;
  std::atomic<std::uint64_t> ended = 0;

  // Nothing waits any more, and the running work is finite. An unresponsive device blocks its caller here, since blocks
  // that it may still write must not be released. False: the device has failed.
  [[nodiscard]] bool end() {
    *static_cast<volatile std::uint32_t*>(stop) = 1;
    const bool good = cudaStreamSynchronize(stream) == cudaSuccess;
    *static_cast<volatile std::uint32_t*>(stop) = 0;
    launched = taken = ended = 0;
    return good;
  }

  ~BatonGpuQueue() {
    for (Slot& slot : slots) {
      cudaFreeHost(slot.host);
      cudaFree(slot.device);
      if (slot.begun != nullptr) cudaEventDestroy(slot.begun);
      if (slot.ended != nullptr) cudaEventDestroy(slot.ended);
    }
    if (stream != nullptr) cudaStreamDestroy(stream);
    cudaFreeHost(stop);
    if (fd >= 0) ::close(fd);
  }
};

inline BatonGpu::~BatonGpu() {
  idle.clear();
  if (now != nullptr) cudaStreamDestroy(now);
  if (after != nullptr) cudaStreamDestroy(after);
}

namespace {

// Runs on the driver's thread and must not call CUDA.
void CUDART_CB on_ended(void* self) {
  auto* const queue = static_cast<BatonGpuQueue*>(self);
  const int fd = queue->fd;
  queue->ended.fetch_add(1, std::memory_order_release);
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(fd, &one, sizeof one);
}

std::unique_ptr<BatonGpuQueue> make_queue(BatonGpu& gpu) {
  auto queue = std::make_unique<BatonGpuQueue>();
  queue->gpu = &gpu;
  queue->stream = make_urgent_stream();
  check(cudaHostAlloc(reinterpret_cast<void**>(&queue->stop), sizeof *queue->stop, cudaHostAllocMapped),
        "no pinned memory");
  *queue->stop = 0;
  for (Slot& slot : queue->slots) {
    check(cudaHostAlloc(reinterpret_cast<void**>(&slot.host), sizeof *slot.host, cudaHostAllocDefault),
          "no pinned memory");
    check(cudaMalloc(reinterpret_cast<void**>(&slot.device), sizeof *slot.device), "no device memory");
    check(cudaEventCreate(&slot.begun), "no event");
    check(cudaEventCreate(&slot.ended), "no event");
  }
  return queue;
}

std::unique_ptr<BatonGpuQueue> open_queue(BatonGpu& gpu) {
  auto queue = take_idle(gpu.lock, gpu.idle);
  if (queue == nullptr) queue = make_queue(gpu);
  queue->fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (queue->fd < 0) throw Failure{BATON_GPU_NO_MEMORY, "no event descriptor"};
  return queue;
}

void close_queue(std::unique_ptr<BatonGpuQueue> queue) {
  if (!queue->end()) return;
  BatonGpu& gpu = *queue->gpu;
  // The descriptor's owner watches it: only closing it ends that.
  ::close(std::exchange(queue->fd, -1));
  const std::lock_guard held(gpu.lock);
  gpu.idle.push_back(std::move(queue));
}

// Writes the descriptors and returns the number of units.
std::uint32_t describe(Slot::Content& content, const BatonGpuPiece* pieces, std::uint32_t piece_count,
                       const BatonGpuGate* gates, std::uint32_t gate_count) {
  if (piece_count == 0 || piece_count > BATON_GPU_PIECES_MAX || gate_count == 0 || gate_count > BATON_GPU_GATES_MAX) {
    throw Failure{BATON_GPU_INVALID, "a launch has too many pieces or gates, or none"};
  }
  std::copy_n(gates, gate_count, content.gates);
  std::fill_n(content.states, gate_count, GateState{});
  std::uint64_t units = 0;
  for (std::uint32_t i = 0; i < piece_count; ++i) {
    const BatonGpuPiece& piece = content.pieces[i] = pieces[i];
    const std::uint64_t all = piece.from | piece.to | piece.from_row | piece.to_row | piece.from_group |
                              piece.to_group | piece.row_bytes | piece.position;
    const std::uint64_t rows = std::uint64_t{piece.rows} * piece.groups;
    if (all % BATON_GPU_ALIGN != 0 || piece.gate >= gate_count || piece.row_bytes == 0 || rows == 0 ||
        rows > kPieceBytesMax / piece.row_bytes) {
      throw Failure{BATON_GPU_INVALID, "a piece is not made of whole 16 bytes, or is empty or too large"};
    }
    const std::uint64_t piece_units = (rows * piece.row_bytes / kVecBytes + kUnitVecs - 1) / kUnitVecs;
    content.first_unit[i] = static_cast<std::uint32_t>(units);
    content.states[piece.gate].units_left += static_cast<std::uint32_t>(piece_units);
    units += piece_units;
    if (units > UINT32_MAX / 2) throw Failure{BATON_GPU_INVALID, "a launch moves too much"};
  }
  return static_cast<std::uint32_t>(units);
}

void launch(BatonGpuQueue& queue, const BatonGpuPiece* pieces, std::uint32_t piece_count, const BatonGpuGate* gates,
            std::uint32_t gate_count, bool sums, std::uint64_t wait_ns) {
  if (queue.launched - queue.taken == BATON_GPU_LAUNCHES_MAX) {
    throw Failure{BATON_GPU_INVALID, "too many launches have not ended"};
  }
  Slot& slot = queue.slots[queue.launched % BATON_GPU_LAUNCHES_MAX];
  const std::uint32_t units = describe(*slot.host, pieces, piece_count, gates, gate_count);
  slot.gates = gate_count;
  const std::size_t described = offsetof(Slot::Content, pieces) + piece_count * sizeof(BatonGpuPiece);
  check(cudaMemcpyAsync(slot.device, slot.host, described, cudaMemcpyHostToDevice, queue.stream), "no launch");
  const Launch work{
      slot.device->pieces, slot.device->first_unit, slot.device->gates, slot.device->states, piece_count, units};
  const bool guards =
      std::any_of(gates, gates + gate_count, [](const BatonGpuGate& gate) { return (gate.release | gate.epoch) != 0; });
  if (guards) {
    open_gates<<<1, BATON_GPU_GATES_MAX, 0, queue.stream>>>(work.gates, work.states, gate_count, queue.stop, wait_ns);
  }
  const std::uint32_t ctas = std::min<std::uint32_t>(units, queue.gpu->processors * kCtasPerProcessor);
  check(cudaEventRecord(slot.begun, queue.stream), "no launch");
  if (sums) {
    move_pieces<true><<<ctas, kThreads, 0, queue.stream>>>(work);
  } else {
    move_pieces<false><<<ctas, kThreads, 0, queue.stream>>>(work);
  }
  check(cudaGetLastError(), "the kernel does not start");
  check(cudaEventRecord(slot.ended, queue.stream), "no launch");
  check(cudaMemcpyAsync(slot.host->states, slot.device->states, gate_count * sizeof(GateState), cudaMemcpyDeviceToHost,
                        queue.stream),
        "no launch");
  check(cudaLaunchHostFunc(queue.stream, &on_ended, &queue), "no launch");
  ++queue.launched;
}

}  // namespace
