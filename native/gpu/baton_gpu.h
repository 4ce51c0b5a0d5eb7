// The boundary between Baton and CUDA: a separate C library, built with nvcc (native/gpu/*.cu) and loaded at run time,
// so that nothing else here needs CUDA to build or to run.
//
// It moves bytes: pieces of memory, by one kernel, as parts of chunks, and batches of copies between the host and a
// device. A chunk's gate holds the words that it waits for and the words that decide its outcome:
//
//    *release >= release_min? ─▶ *epoch == epoch_is? ─▶ move ─▶ *epoch == epoch_is still? ─▶ *signal = signal_is
//
// Every call returns a status; `baton_gpu_why` gives the reason. Addresses are integers, since those of other devices
// and processes must not be dereferenced. A device may be used from any thread; a queue from one thread at a time.
#ifndef BATON_GPU_H
#define BATON_GPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

#define BATON_GPU_ABI 3u
#define BATON_GPU_ALIGN 16u  // Bytes: alignment of addresses, strides and lengths, and the unit that a thread moves.
#define BATON_GPU_LAUNCHES_MAX 2u   // Unfinished launches of a queue: one runs while the next is made.
#define BATON_GPU_PIECES_MAX 4096u  // Per launch.
#define BATON_GPU_GATES_MAX 256u
#define BATON_GPU_SCRATCH_BYTES 64u

typedef enum BatonGpuStatus {
  BATON_GPU_OK = 0,
  BATON_GPU_NO_DRIVER,  // No NVIDIA driver on this host, or one too old for the library.
  BATON_GPU_NO_DEVICE,  // A driver, but no such device, or one that the kernels are not built for.
  BATON_GPU_INVALID,    // An invalid argument; the call had no effect.
  BATON_GPU_NO_MEMORY,
  BATON_GPU_NOT_SHARED,  // Memory that cannot be shared, or another process's memory that cannot be mapped here.
  BATON_GPU_FAILED,      // The device failed and may be unusable.
} BatonGpuStatus;

typedef struct BatonGpu BatonGpu;            // A device as one agent uses it.
typedef struct BatonGpuQueue BatonGpuQueue;  // Launches that run one after another.

// A piece: `groups` times `rows` rows of `row_bytes` each, group by group. `to` 0: only summed, not moved.
typedef struct BatonGpuPiece {
  uint64_t from, to;
  uint64_t from_row, to_row;  // Distance from one row to the next.
  uint64_t from_group, to_group;
  uint32_t row_bytes, rows, groups;
  uint32_t gate;
  uint64_t position;  // Position of the piece's first byte in its chunk, for the sum.
} BatonGpuPiece;

// A gate: addresses of 64-bit words of device memory, each 0 for none.
typedef struct BatonGpuGate {
  uint64_t release, release_min;
  uint64_t epoch, epoch_is;
  uint64_t signal, signal_is;  // Written once the whole chunk is visible to every reader of the signal.
} BatonGpuGate;

typedef enum BatonGpuOutcome {
  BATON_GPU_MOVED = 0,
  BATON_GPU_NOT_READY,  // Not released in time: nothing was moved.
  BATON_GPU_STALE,      // The epoch differs: the bytes moved, if any, are invalid.
} BatonGpuOutcome;

typedef struct BatonGpuResult {
  uint32_t outcome;
  uint32_t sum;  // Checksum of the bytes moved, see sum.h; 0 unless requested.
} BatonGpuResult;

typedef struct BatonGpuHandle {
  uint8_t bytes[96];
} BatonGpuHandle;

uint32_t baton_gpu_abi(void);
// The reason of this thread's last call that did not return BATON_GPU_OK.
const char* baton_gpu_why(void);

// Runs the kernel once, too, so that its first real use takes no longer than later ones.
BatonGpuStatus baton_gpu_open(int32_t device, BatonGpu** gpu);
void baton_gpu_close(BatonGpu* gpu);
const char* baton_gpu_name(const BatonGpu* gpu);

// Memory that was allocated here and not freed is released with the process, not with the device.
BatonGpuStatus baton_gpu_allocate(BatonGpu* gpu, uint64_t bytes, uint64_t* address);
// Waits for pending writes of words, such as those of `baton_gpu_write_after`. If this process has also mapped the
// memory, it is freed once that mapping ends.
BatonGpuStatus baton_gpu_free(BatonGpu* gpu, uint64_t address);
// Either end may be host memory. Returns once the copy has ended.
BatonGpuStatus baton_gpu_copy(BatonGpu* gpu, uint64_t to, uint64_t from, uint64_t bytes);
BatonGpuStatus baton_gpu_fill(BatonGpu* gpu, uint64_t address, uint8_t value, uint64_t bytes);

// The allocation that an address of device memory lies in.
BatonGpuStatus baton_gpu_range(BatonGpu* gpu, uint64_t address, uint64_t* base, uint64_t* bytes);
// The handle with which a process of this host maps the allocation; this process may do so, too.
BatonGpuStatus baton_gpu_share(BatonGpu* gpu, uint64_t base, BatonGpuHandle* handle);
// `bytes` is the size actually mapped, whatever the handle's sender says.
BatonGpuStatus baton_gpu_map(BatonGpu* gpu, const BatonGpuHandle* handle, uint64_t* base, uint64_t* bytes);
BatonGpuStatus baton_gpu_unmap(BatonGpu* gpu, uint64_t base);
// A dma-buf of whole pages around memory of the device, with which an RDMA adapter of this host registers it; the
// caller closes it. `offset`: position of `address` in it. BATON_GPU_NOT_SHARED if the driver makes none.
BatonGpuStatus baton_gpu_dma_buf(BatonGpu* gpu, uint64_t address, uint64_t bytes, int* fd, uint64_t* offset);
// Returns once all that adapters have reported as written is visible to the device.
BatonGpuStatus baton_gpu_flush(BatonGpu* gpu);

// Writes a word of device memory, visible to every device and process that maps it. Returns at once, as does the next.
BatonGpuStatus baton_gpu_write(BatonGpu* gpu, uint64_t address, uint64_t value);
// The same, once the work now in `stream` (a cudaStream_t) has ended. Calls take effect in order, whatever streams they
// name.
BatonGpuStatus baton_gpu_write_after(BatonGpu* gpu, uint64_t stream, uint64_t address, uint64_t value);

BatonGpuStatus baton_gpu_queue_open(BatonGpu* gpu, BatonGpuQueue** queue);
// A fence: waiting launches give up, running ones end; afterwards nothing of this queue writes. Its memory is kept for
// the next queue, since freeing memory would wait for all work of the GPU.
void baton_gpu_queue_close(BatonGpuQueue* queue);
// Device memory, BATON_GPU_SCRATCH_BYTES, for use by this queue's launches.
uint64_t baton_gpu_queue_scratch(const BatonGpuQueue* queue);
// A descriptor that is readable after a launch has ended, until it is read.
int baton_gpu_queue_fd(const BatonGpuQueue* queue);
// One kernel for all pieces. If no gate is released yet, the device waits for the first one, at most `wait_ns`; chunks
// that are not released by then are not moved. `sum`: whether to compute the checksum of each gate.
BatonGpuStatus baton_gpu_launch(BatonGpuQueue* queue, const BatonGpuPiece* pieces, uint32_t piece_count,
                                const BatonGpuGate* gates, uint32_t gate_count, int sum, uint64_t wait_ns);
// Takes the results of the oldest launch: one per gate, 0 while it has not ended. `device_ns`: the launch's duration.
BatonGpuStatus baton_gpu_ended(BatonGpuQueue* queue, BatonGpuResult* results, uint32_t* gate_count,
                               uint64_t* device_ns);

// ---------------------------------------------------------------- copies between the host and the device

typedef struct BatonGpuCopies BatonGpuCopies;  // Two streams of batches, one for each direction.

typedef struct BatonGpuCopy {
  uint64_t to, from, bytes;
} BatonGpuCopy;

typedef enum BatonGpuDirection {
  BATON_GPU_TO_HOST = 0,
  BATON_GPU_TO_DEVICE,
} BatonGpuDirection;

// Called on the driver's thread once a batch has ended; must not call this library. A device that fails calls nothing.
typedef void (*BatonGpuCopied)(void* context, uint64_t ticket);

BatonGpuStatus baton_gpu_copies_open(BatonGpu* gpu, BatonGpuCopied copied, void* context, BatonGpuCopies** copies);
// A fence: waits until every batch has ended.
void baton_gpu_copies_close(BatonGpuCopies* copies);
// Pins host memory for copies; `address` and `bytes` are whole pages.
BatonGpuStatus baton_gpu_copies_pin(BatonGpuCopies* copies, uint64_t address, uint64_t bytes);
BatonGpuStatus baton_gpu_copies_unpin(BatonGpuCopies* copies, uint64_t address);
// Starts a batch, in any order within it; batches of a direction run one after another. If `ordered`, it begins once
// the work now in the stream `after` (a cudaStream_t) has ended. After an error none of its copies runs any more.
BatonGpuStatus baton_gpu_copies_start(BatonGpuCopies* copies, uint64_t ticket, BatonGpuDirection direction,
                                      const BatonGpuCopy* batch, uint32_t count, int ordered, uint64_t after);
// BATON_GPU_FAILED if the device has failed, so that no batch ends any more.
BatonGpuStatus baton_gpu_copies_check(BatonGpuCopies* copies);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
