// The one kernel that moves pieces: paged gather and scatter, conversion between layouts, reading a peer's blocks,
// writing into a peer's slots, summing.
//
// Pieces are cut into units of 64 KiB; CTAs take units in turn, so that one launch of few large or many small pieces
// keeps all of them busy. A thread moves 16 bytes at a time, with four loads in flight before the first store.
//
// Limits. Within one GPU: memory, since each byte is read and written once, so half of the memory bandwidth; compare
// with a device-to-device cudaMemcpy. From a peer over NVLink: the link. Over PCIe: the bus.
// Rows under 128 bytes cost more than their bytes, since memory comes in sectors of 32 and lines of 128. The sum
// costs two multiplications per 16 bytes. `python -m baton_native.bench_cuda` measures all this on the local GPU.
#pragma once

#include "gpu/baton_gpu.h"
#include "gpu/sum.h"

namespace baton::gpu {

constexpr std::uint32_t kThreads = 256;
constexpr std::uint32_t kVecBytes = BATON_GPU_ALIGN;
constexpr std::uint32_t kUnitVecs = 4096;
constexpr std::uint32_t kLoadsAhead = 4;
constexpr std::uint32_t kWaitStepNs = 500;

// A gate's state so far.
struct GateState {
  unsigned long long sum;
  std::uint32_t units_left;
  std::uint32_t outcome;
};

struct Launch {
  const BatonGpuPiece* pieces;
  const std::uint32_t* first_unit;  // Indexed by piece; ascending.
  const BatonGpuGate* gates;
  GateState* states;
  std::uint32_t piece_count;
  std::uint32_t units;
};

// Accesses to words that other devices and processes read or write concurrently.
__device__ __forceinline__ std::uint64_t load_acquire(std::uint64_t address) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(std::uint64_t address, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ __forceinline__ std::uint64_t now_ns() {
  std::uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}
// Avoids the read-only path (`.nc`), whose cache could return bytes from before the release. A peer may write these
// bytes during the read; the epoch reveals that afterwards.
__device__ __forceinline__ uint4 load(std::uint64_t address) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}
__device__ __forceinline__ void store(std::uint64_t address, uint4 value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// Runs one thread per gate before the moving kernel, so that waiting occupies a single CTA. Once a gate is released, or
// after `wait_ns` without one, the released gates proceed; the others are left to another launch.
__global__ void __launch_bounds__(BATON_GPU_GATES_MAX)
    open_gates(const BatonGpuGate* gates, GateState* states, std::uint32_t count, const volatile std::uint32_t* stop,
               std::uint64_t wait_ns) {
  const bool mine = threadIdx.x < count;
  const BatonGpuGate gate = mine ? gates[threadIdx.x] : BatonGpuGate{};
  const std::uint64_t began_ns = now_ns();
  bool released = false;
  while (true) {
    released = mine && (gate.release == 0 || load_acquire(gate.release) >= gate.release_min);
    const bool in_vain = threadIdx.x == 0 && (*stop != 0 || now_ns() - began_ns > wait_ns);
    if (__syncthreads_or(released || in_vain)) break;
    __nanosleep(kWaitStepNs);
  }
  if (!mine) return;
  const bool current = gate.epoch == 0 || load_acquire(gate.epoch) == gate.epoch_is;
  states[threadIdx.x].outcome = !released ? BATON_GPU_NOT_READY : current ? BATON_GPU_MOVED : BATON_GPU_STALE;
}

// Moves 16-byte words [begin, end) of a piece, counted row by row; returns this thread's part of their sum.
template <bool kSums, bool kDense>
__device__ inline std::uint64_t move_words(const BatonGpuPiece& piece, std::uint32_t begin, std::uint32_t end) {
  const std::uint32_t row_vecs = piece.row_bytes / kVecBytes;
  const auto offset = [&](std::uint32_t word, std::uint64_t row_stride, std::uint64_t group_stride) -> std::uint64_t {
    if (kDense) return std::uint64_t{word} * kVecBytes;
    const std::uint32_t row = word / row_vecs, group = row / piece.rows;
    return group * group_stride + (row - group * piece.rows) * row_stride + (word - row * row_vecs) * kVecBytes;
  };
  std::uint64_t sum = 0;
  for (std::uint32_t first = begin + threadIdx.x; first < end; first += kLoadsAhead * kThreads) {
    uint4 words[kLoadsAhead];
#pragma unroll
    for (std::uint32_t i = 0; i < kLoadsAhead; ++i) {
      const std::uint32_t word = first + i * kThreads;
      if (word < end) words[i] = load(piece.from + offset(word, piece.from_row, piece.from_group));
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kLoadsAhead; ++i) {
      const std::uint32_t word = first + i * kThreads;
      if (word >= end) break;
      if (piece.to != 0) store(piece.to + offset(word, piece.to_row, piece.to_group), words[i]);
      if (kSums) sum += sum_of(words[i].x, words[i].y, words[i].z, words[i].w, piece.position / kVecBytes + word);
    }
  }
  return sum;
}

// The last unit of a chunk decides its outcome. The fences order every thread's loads and stores of the chunk before
// the second read of the epoch, and before the signal becomes visible.
__device__ inline void finish_unit(const BatonGpuGate& gate, GateState& state) {
  __threadfence_system();
  if (atomicSub(&state.units_left, 1) != 1 || state.outcome != BATON_GPU_MOVED) return;
  __threadfence_system();
  if (gate.epoch != 0 && load_acquire(gate.epoch) != gate.epoch_is) {
    state.outcome = BATON_GPU_STALE;
  } else if (gate.signal != 0) {
    store_release(gate.signal, gate.signal_is);
  }
}

template <bool kSums>
__global__ void __launch_bounds__(kThreads) move_pieces(const Launch launch) {
  __shared__ std::uint32_t index;
  __shared__ unsigned long long sum;
  for (std::uint32_t unit = blockIdx.x; unit < launch.units; unit += gridDim.x) {
    if (threadIdx.x == 0) {
      std::uint32_t low = 0, high = launch.piece_count;
      while (high - low > 1) {
        const std::uint32_t middle = (low + high) / 2;
        (launch.first_unit[middle] <= unit ? low : high) = middle;
      }
      index = low;
      sum = 0;
    }
    __syncthreads();
    const BatonGpuPiece& piece = launch.pieces[index];
    GateState& state = launch.states[piece.gate];
    if (state.outcome == BATON_GPU_MOVED) {  // Only the last unit changes it.
      const std::uint32_t words = piece.row_bytes / kVecBytes * piece.rows * piece.groups;
      const std::uint32_t begin = (unit - launch.first_unit[index]) * kUnitVecs;
      const std::uint32_t end = min(begin + kUnitVecs, words);
      std::uint64_t part = piece.rows * piece.groups == 1 ? move_words<kSums, true>(piece, begin, end)
                                                          : move_words<kSums, false>(piece, begin, end);
      if (kSums) {
        for (int step = 16; step > 0; step /= 2) part += __shfl_xor_sync(~0U, part, step);
        if (threadIdx.x % 32 == 0) atomicAdd(&sum, part);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      if (kSums) atomicAdd(&state.sum, sum);
      finish_unit(launch.gates[piece.gate], state);
    }
    __syncthreads();  // The next unit overwrites these words.
  }
}

}  // namespace baton::gpu
