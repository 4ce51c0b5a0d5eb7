// The boundary between Baton and CUDA: a C library of its own, built where nvcc is (native/gpu/*.cu) and loaded at run
// time, so that nothing else here needs CUDA to build or to run.
//
// It moves bytes: pieces of memory, by one kernel, as parts of chunks. What a chunk waits for, and by what it
// is judged, is its gate:
//
//    *release >= release_min? ─▶ *epoch == epoch_is? ─▶ move ─▶ *epoch == epoch_is still? ─▶ *signal = signal_is
//
// Every call returns a status; `baton_gpu_why` then says more. Addresses are numbers, since those of other devices and
// processes must not be dereferenced. A device may be used from any thread; a queue from one thread at a time.
#ifndef BATON_GPU_H
#define BATON_GPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

#define BATON_GPU_ABI 1u
#define BATON_GPU_ALIGN 16u         // Of addresses, strides and lengths: what one thread moves at once.
#define BATON_GPU_LAUNCHES_MAX 2u   // Of a queue that have not ended: one runs while the next is made.
#define BATON_GPU_PIECES_MAX 4096u  // Of a launch.
#define BATON_GPU_GATES_MAX 256u
#define BATON_GPU_SCRATCH_BYTES 64u

typedef enum BatonGpuStatus {
  BATON_GPU_OK = 0,
  BATON_GPU_NO_DRIVER,  // No NVIDIA driver on this host, or one too old for the library.
  BATON_GPU_NO_DEVICE,  // A driver, but not that device, or one that the kernels are not built for.
  BATON_GPU_INVALID,    // An argument makes no sense; nothing has happened.
  BATON_GPU_NO_MEMORY,
  BATON_GPU_NOT_SHARED,  // Memory that cannot be shared, or of another process that cannot be mapped here.
  BATON_GPU_FAILED,      // The device failed: it may not be usable any more.
} BatonGpuStatus;

typedef struct BatonGpu BatonGpu;            // A device as one agent uses it.
typedef struct BatonGpuQueue BatonGpuQueue;  // Launches that run one after the other.

// `groups` times `rows` rows of `row_bytes` each, group by group, from one place to another. `to` 0: only summed.
typedef struct BatonGpuPiece {
  uint64_t from, to;
  uint64_t from_row, to_row;  // From one row to the next.
  uint64_t from_group, to_group;
  uint32_t row_bytes, rows, groups;
  uint32_t gate;
  uint64_t position;  // Of the piece's first byte in its chunk; for the sum.
} BatonGpuPiece;

// Addresses of 64-bit words of device memory, each 0 for none.
typedef struct BatonGpuGate {
  uint64_t release, release_min;
  uint64_t epoch, epoch_is;
  uint64_t signal, signal_is;  // Written once all of the chunk is visible to whoever reads the signal.
} BatonGpuGate;

typedef enum BatonGpuOutcome {
  BATON_GPU_MOVED = 0,
  BATON_GPU_NOT_READY,  // Not released in time: nothing was moved.
  BATON_GPU_STALE,      // The epoch is another: what was moved, if anything, is worth nothing.
} BatonGpuOutcome;

typedef struct BatonGpuResult {
  uint32_t outcome;
  uint32_t sum;  // Of what was moved, see sum.h; 0 unless it was asked for.
} BatonGpuResult;

typedef struct BatonGpuHandle {
  uint8_t bytes[96];
} BatonGpuHandle;

uint32_t baton_gpu_abi(void);
// Of this thread's last call that did not return BATON_GPU_OK.
const char* baton_gpu_why(void);

// Runs the kernel once, so that its first real use takes no longer than any other.
BatonGpuStatus baton_gpu_open(int32_t device, BatonGpu** gpu);
void baton_gpu_close(BatonGpu* gpu);
const char* baton_gpu_name(const BatonGpu* gpu);

// What was allocated here and not freed goes with the process, not with the device.
BatonGpuStatus baton_gpu_allocate(BatonGpu* gpu, uint64_t bytes, uint64_t* address);
// Waits for the words that are still to be written, as by `baton_gpu_write_after`. Where this process has mapped it,
// too, it is freed when that ends.
BatonGpuStatus baton_gpu_free(BatonGpu* gpu, uint64_t address);
// Either end may be host memory. Ended when it returns.
BatonGpuStatus baton_gpu_copy(BatonGpu* gpu, uint64_t to, uint64_t from, uint64_t bytes);
BatonGpuStatus baton_gpu_fill(BatonGpu* gpu, uint64_t address, uint8_t value, uint64_t bytes);

// The allocation that an address of device memory lies in.
BatonGpuStatus baton_gpu_range(BatonGpu* gpu, uint64_t address, uint64_t* base, uint64_t* bytes);
// What another process of this host needs to map the allocation; this one may, too.
BatonGpuStatus baton_gpu_share(BatonGpu* gpu, uint64_t base, BatonGpuHandle* handle);
// `bytes` is what is really mapped, whatever the handle's sender says.
BatonGpuStatus baton_gpu_map(BatonGpu* gpu, const BatonGpuHandle* handle, uint64_t* base, uint64_t* bytes);
BatonGpuStatus baton_gpu_unmap(BatonGpu* gpu, uint64_t base);

// Writes a word of device memory, for every device and process that sees it. Returns at once, as the next one does.
BatonGpuStatus baton_gpu_write(BatonGpu* gpu, uint64_t address, uint64_t value);
// The same, once what is in `stream` (a cudaStream_t) now has ended. Calls take effect in their order, whatever streams
// they name.
BatonGpuStatus baton_gpu_write_after(BatonGpu* gpu, uint64_t stream, uint64_t address, uint64_t value);

BatonGpuStatus baton_gpu_queue_open(BatonGpu* gpu, BatonGpuQueue** queue);
// A fence: whatever waits gives up, what moves ends; then nothing of this queue writes any more. What it was made of is
// kept for the next one, since to free memory would wait for all that the GPU does.
void baton_gpu_queue_close(BatonGpuQueue* queue);
// Some memory of the device, BATON_GPU_SCRATCH_BYTES, for whatever this queue's launches need.
uint64_t baton_gpu_queue_scratch(const BatonGpuQueue* queue);
// Readable after a launch ended, until it is read.
int baton_gpu_queue_fd(const BatonGpuQueue* queue);
// One kernel for all pieces. Where no gate is released yet, the device waits for the first, but no longer than
// `wait_ns`; chunks that are not released by then are not moved. `sum`: of each gate.
BatonGpuStatus baton_gpu_launch(BatonGpuQueue* queue, const BatonGpuPiece* pieces, uint32_t piece_count,
                                const BatonGpuGate* gates, uint32_t gate_count, int sum, uint64_t wait_ns);
// Takes the results of the oldest launch: as many as it had gates, 0 while it has not ended. `device_ns`: how long it
// ran.
BatonGpuStatus baton_gpu_ended(BatonGpuQueue* queue, BatonGpuResult* results, uint32_t* gate_count,
                               uint64_t* device_ns);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
