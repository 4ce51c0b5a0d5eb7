// A libbaton_gpu.so for hosts without a GPU: device memory that the host cannot touch, mapped between processes
// (device_memory.h), and a thread for each queue that moves pieces as the kernel does. A piece outside of what was
// allocated or mapped aborts: on a GPU it ends the context of the process that launched it.
//
// $FAKE_GPU_DIR holds a file `control` of 32-bit words that tests may set at any time (see Control), and one file of
// counts for each process, named after its id (see Counts).
#include <sys/eventfd.h>
#include <sys/uio.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "gpu/baton_gpu.h"
#include "gpu/sum.h"
#include "tests/fabric/device_memory.h"
#include "tests/fabric/fake_copies.h"

using namespace baton::tests;

namespace {

using Clock = std::chrono::steady_clock;

struct Handle {
  std::int32_t pid, fd;
  std::uint64_t base, bytes;
};

thread_local std::string why;

BatonGpuStatus fail(BatonGpuStatus status, const char* text) {
  why = text;
  return status;
}

// Through the kernel, so that a block that its owner overwrites under the read is no race for a sanitizer to find: that
// is what epochs and sums are for. The write is an ordinary one.
void move(std::uint8_t* to, const std::uint8_t* from, std::uint64_t bytes, bool sums, std::uint64_t position,
          std::uint64_t& sum) {
  std::vector<std::uint8_t> buffer(bytes);
  const iovec local{buffer.data(), bytes}, remote{const_cast<std::uint8_t*>(from), bytes};
  if (::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0) != static_cast<ssize_t>(bytes)) {
    misused("memory of the device cannot be read");
  }
  for (std::uint64_t at = 0; sums && at < bytes; at += BATON_GPU_ALIGN) {
    std::uint32_t words[4];
    std::memcpy(words, buffer.data() + at, sizeof words);
    sum += baton::gpu::sum_of(words[0], words[1], words[2], words[3], (position + at) / BATON_GPU_ALIGN);
  }
  if (to != nullptr) std::memcpy(to, buffer.data(), bytes);
}

struct Work {
  std::vector<BatonGpuPiece> pieces;
  std::vector<BatonGpuGate> gates;
  bool sums = false;
  std::chrono::nanoseconds wait{};
};

struct Done {
  std::vector<BatonGpuResult> results;
  bool failed = false;
};

}  // namespace

struct BatonGpu {
  struct Write {
    std::uint64_t address, value, after_work;
  };
  std::mutex lock;
  std::condition_variable changed, written;
  std::deque<Write> writes;
  bool closing = false;
  std::thread after;  // Runs the callers' streams.

  void run() {
    World& world = World::get();
    std::unique_lock held(lock);
    while (!closing) {
      while (!writes.empty() && world.control->hold_streams == 0 &&
             Streams::get().has_done(writes.front().after_work)) {
        world.word(writes.front().address) = writes.front().value;
        writes.pop_front();
      }
      written.notify_all();
      changed.wait_for(held, std::chrono::milliseconds(writes.empty() ? 1000 : 1));
    }
  }
};

struct BatonGpuQueue {
  BatonGpu* gpu = nullptr;
  std::uint64_t scratch = 0;
  std::mutex lock;
  std::condition_variable changed;
  std::deque<Work> work;
  std::deque<Done> done;
  std::size_t under_way = 0;
  bool closing = false;
  int fd = -1;
  std::thread thread;

  void run() {
    World& world = World::get();
    std::unique_lock held(lock);
    while (true) {
      changed.wait(held, [&] { return closing || !work.empty(); });
      if (closing) return;
      const Work now = std::move(work.front());
      work.pop_front();
      // A launch that waits ends with its queue; one that moves is finished.
      const auto due = Clock::now() + std::chrono::milliseconds(world.control->delay_ms);
      while (!closing && (world.control->hold != 0 || Clock::now() < due)) {
        changed.wait_for(held, std::chrono::milliseconds(1));
      }
      if (closing) return;
      held.unlock();
      Done ended = carry_out(world, now);
      held.lock();
      done.push_back(std::move(ended));
      const std::uint64_t one = 1;
      [[maybe_unused]] const auto written = ::write(fd, &one, sizeof one);
    }
  }

  static bool is_current(World& world, const BatonGpuGate& gate) {
    return gate.epoch == 0 || world.word(gate.epoch) == gate.epoch_is;
  }

  std::vector<BatonGpuResult> open_gates(World& world, const Work& now) const {
    const auto until = Clock::now() + now.wait;
    std::vector<bool> released(now.gates.size());
    while (true) {
      bool any = false;
      for (std::size_t i = 0; i < now.gates.size(); ++i) {
        const BatonGpuGate& gate = now.gates[i];
        released[i] = gate.release == 0 || world.word(gate.release) >= gate.release_min;
        any = any || released[i];
      }
      if (any || Clock::now() >= until) break;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    std::vector<BatonGpuResult> results;
    for (std::size_t i = 0; i < now.gates.size(); ++i) {
      const BatonGpuOutcome outcome = !released[i]                      ? BATON_GPU_NOT_READY
                                      : is_current(world, now.gates[i]) ? BATON_GPU_MOVED
                                                                        : BATON_GPU_STALE;
      results.push_back({static_cast<std::uint32_t>(outcome), 0});
    }
    return results;
  }

  Done carry_out(World& world, const Work& now) const {
    ++world.counts->launches;
    if (World::strikes(world.control->fail_run)) return {.failed = true};
    std::vector<BatonGpuResult> results = open_gates(world, now);
    std::vector<std::uint64_t> sums(results.size());
    std::vector<bool> corrupt(results.size());
    for (std::size_t i = 0; i < corrupt.size(); ++i) corrupt[i] = World::strikes(world.control->corrupt);
    for (const BatonGpuPiece& piece : now.pieces) {
      if (results[piece.gate].outcome != BATON_GPU_MOVED) continue;
      std::uint64_t position = piece.position;
      for (std::uint32_t group = 0; group < piece.groups; ++group) {
        for (std::uint32_t row = 0; row < piece.rows; ++row, position += piece.row_bytes) {
          const std::uint64_t from = piece.from + group * piece.from_group + row * piece.from_row;
          const std::uint64_t to = piece.to + group * piece.to_group + row * piece.to_row;
          std::uint8_t* const target = piece.to == 0 ? nullptr : world.behind(to, piece.row_bytes);
          move(target, world.behind(from, piece.row_bytes), piece.row_bytes, now.sums, position, sums[piece.gate]);
          if (corrupt[piece.gate]) {
            if (target != nullptr) target[piece.row_bytes / 2] ^= 4;
            sums[piece.gate] += 0x1234567;
            corrupt[piece.gate] = false;
          }
        }
      }
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (results[i].outcome == BATON_GPU_MOVED) {
        ++world.counts->chunks;
        const bool strikes = now.gates[i].epoch != 0 && World::strikes(world.control->stale);
        if (strikes || !is_current(world, now.gates[i])) {
          results[i].outcome = BATON_GPU_STALE;
        } else if (now.gates[i].signal != 0) {
          world.word(now.gates[i].signal) = now.gates[i].signal_is;
        }
      }
      if (results[i].outcome == BATON_GPU_NOT_READY) ++world.counts->not_ready;
      if (results[i].outcome == BATON_GPU_STALE) ++world.counts->stale;
      if (now.sums) results[i].sum = baton::gpu::fold(sums[i]);
    }
    return {.results = std::move(results)};
  }
};

extern "C" {

uint32_t baton_gpu_abi(void) {
  return BATON_GPU_ABI;
}

const char* baton_gpu_why(void) {
  return why.c_str();
}

BatonGpuStatus baton_gpu_open(int32_t device, BatonGpu** gpu) {
  World& world = World::get();
  if (world.control->no_driver != 0) return fail(BATON_GPU_NO_DRIVER, "there is no NVIDIA driver here");
  if (world.control->no_device != 0 || device < 0 || device > 1) {
    return fail(BATON_GPU_NO_DEVICE, "there is no such GPU here");
  }
  *gpu = new BatonGpu;
  (*gpu)->after = std::thread(&BatonGpu::run, *gpu);
  ++world.counts->devices;
  return BATON_GPU_OK;
}

void baton_gpu_close(BatonGpu* gpu) {
  if (gpu == nullptr) return;
  {
    const std::lock_guard held(gpu->lock);
    gpu->closing = true;
  }
  gpu->changed.notify_all();
  gpu->after.join();
  delete gpu;
  --World::get().counts->devices;
}

const char* baton_gpu_name(const BatonGpu*) {
  return "none: a stand-in";
}

BatonGpuStatus baton_gpu_allocate(BatonGpu*, uint64_t bytes, uint64_t* address) {
  World& world = World::get();
  const int fd = ::memfd_create("fake-gpu", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return fail(BATON_GPU_NO_MEMORY, "no memory");
  *address = world.add(bytes, fd, true);
  if (*address == 0) return fail(BATON_GPU_NO_MEMORY, "no memory");
  ++world.counts->allocations;
  return BATON_GPU_OK;
}

BatonGpuStatus baton_gpu_free(BatonGpu* gpu, uint64_t address) {
  {
    std::unique_lock held(gpu->lock);
    gpu->changed.notify_all();
    gpu->written.wait(held, [&] { return gpu->writes.empty(); });
  }
  Streams::get().drain();
  World& world = World::get();
  const std::lock_guard held(world.lock);
  const auto at = world.memory.find(address);
  if (at == world.memory.end() || at->second.fd < 0) misused("what is freed was not allocated");
  if (at->second.freed) misused("memory is freed twice");
  at->second.freed = true;
  if (at->second.mapped == 0) world.remove(at);
  --world.counts->allocations;
  return BATON_GPU_OK;
}

BatonGpuStatus baton_gpu_copy(BatonGpu*, uint64_t to, uint64_t from, uint64_t bytes) {
  World& world = World::get();
  std::memcpy(world.anywhere(to, bytes), world.anywhere(from, bytes), bytes);
  return BATON_GPU_OK;
}

BatonGpuStatus baton_gpu_fill(BatonGpu*, uint64_t address, uint8_t value, uint64_t bytes) {
  std::memset(World::get().behind(address, bytes), value, bytes);
  return BATON_GPU_OK;
}

BatonGpuStatus baton_gpu_range(BatonGpu*, uint64_t address, uint64_t* base, uint64_t* bytes) {
  World& world = World::get();
  const std::lock_guard held(world.lock);
  const auto at = world.find(address);
  if (at == world.memory.end()) {
    return fail(BATON_GPU_INVALID, "the address does not lie in memory of this GPU");
  }
  *base = at->first;
  *bytes = at->second.bytes;
  return BATON_GPU_OK;
}

BatonGpuStatus baton_gpu_share(BatonGpu*, uint64_t base, BatonGpuHandle* packed) {
  World& world = World::get();
  if (world.control->no_share != 0) return fail(BATON_GPU_NOT_SHARED, "the memory cannot be shared");
  const std::lock_guard held(world.lock);
  const auto at = world.memory.find(base);
  if (at == world.memory.end() || at->second.fd < 0) misused("what is shared was not allocated");
  const Handle handle{::getpid(), at->second.fd, base, at->second.bytes};
  *packed = {};
  std::memcpy(packed->bytes, &handle, sizeof handle);
  return BATON_GPU_OK;
}

BatonGpuStatus baton_gpu_map(BatonGpu*, const BatonGpuHandle* packed, uint64_t* base, uint64_t* bytes) {
  World& world = World::get();
  const auto refuse = [] { return fail(BATON_GPU_NOT_SHARED, "the other process's memory cannot be mapped"); };
  if (world.control->no_map != 0) return refuse();
  Handle handle;
  std::memcpy(&handle, packed->bytes, sizeof handle);
  if (handle.pid == ::getpid()) {
    const std::lock_guard held(world.lock);
    const auto at = world.memory.find(handle.base);
    if (at == world.memory.end() || at->second.freed) return refuse();
    ++at->second.mapped;
    *base = at->first;
    *bytes = at->second.bytes;
  } else {
    const std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0 || ::lseek(fd, 0, SEEK_END) != static_cast<off_t>(handle.bytes)) return refuse();
    *base = world.add(handle.bytes, fd, false);
    *bytes = handle.bytes;
    ::close(fd);
    if (*base == 0) return refuse();
  }
  ++world.counts->mappings;
  return BATON_GPU_OK;
}

BatonGpuStatus baton_gpu_unmap(BatonGpu*, uint64_t base) {
  World& world = World::get();
  const std::lock_guard held(world.lock);
  const auto at = world.memory.find(base);
  if (at == world.memory.end() || at->second.mapped == 0) misused("what is unmapped was not mapped");
  if (--at->second.mapped == 0 && (at->second.fd < 0 || at->second.freed)) world.remove(at);
  --world.counts->mappings;
  return BATON_GPU_OK;
}

BatonGpuStatus baton_gpu_dma_buf(BatonGpu*, uint64_t address, uint64_t bytes, int* fd, uint64_t* offset) {
  World& world = World::get();
  if (world.control->no_dma_buf != 0) return fail(BATON_GPU_NOT_SHARED, "the driver makes no dma-buf of this memory");
  const std::lock_guard held(world.lock);
  const auto at = world.find(address, bytes);
  if (at == world.memory.end() || at->second.fd < 0) misused("what an adapter is to reach was not allocated");
  *fd = ::fcntl(at->second.fd, F_DUPFD_CLOEXEC, 0);
  *offset = address - at->first;
  return BATON_GPU_OK;
}

BatonGpuStatus baton_gpu_flush(BatonGpu*) {
  if (World::get().control->no_flush != 0)
    return fail(BATON_GPU_NOT_SHARED, "the GPU does not tell of adapters' writes");
  using Written = void(std::uint64_t address, std::uint64_t bytes);
  static auto* const flush = reinterpret_cast<void (*)(Written*)>(find_loaded("verbs", "fake_verbs_flush"));
  const auto written = [](std::uint64_t address, std::uint64_t bytes) { Streams::get().forget(address, bytes); };
  if (flush != nullptr && World::get().control->lose_flush == 0) flush(written);
  return BATON_GPU_OK;
}

BatonGpuStatus baton_gpu_write(BatonGpu*, uint64_t address, uint64_t value) {
  World::get().word(address) = value;
  return BATON_GPU_OK;
}

BatonGpuStatus baton_gpu_write_after(BatonGpu* gpu, uint64_t stream, uint64_t address, uint64_t value) {
  Streams::get().release(stream, value);
  const std::uint64_t after_work = Streams::get().submitted();
  {
    const std::lock_guard held(gpu->lock);
    gpu->writes.push_back({address, value, after_work});
  }
  gpu->changed.notify_all();
  return BATON_GPU_OK;
}

BatonGpuStatus baton_gpu_queue_open(BatonGpu* gpu, BatonGpuQueue** queue) {
  *queue = new BatonGpuQueue;
  (*queue)->gpu = gpu;
  if (baton_gpu_allocate(gpu, BATON_GPU_SCRATCH_BYTES, &(*queue)->scratch) != BATON_GPU_OK) misused("no memory");
  (*queue)->fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  (*queue)->thread = std::thread(&BatonGpuQueue::run, *queue);
  ++World::get().counts->queues;
  return BATON_GPU_OK;
}

void baton_gpu_queue_close(BatonGpuQueue* queue) {
  if (queue == nullptr) return;
  {
    const std::lock_guard held(queue->lock);
    queue->closing = true;
  }
  queue->changed.notify_all();
  queue->thread.join();
  ::close(queue->fd);
  baton_gpu_free(queue->gpu, queue->scratch);
  delete queue;
  --World::get().counts->queues;
}

uint64_t baton_gpu_queue_scratch(const BatonGpuQueue* queue) {
  return queue->scratch;
}

int baton_gpu_queue_fd(const BatonGpuQueue* queue) {
  return queue->fd;
}

BatonGpuStatus baton_gpu_launch(BatonGpuQueue* queue, const BatonGpuPiece* pieces, uint32_t piece_count,
                                const BatonGpuGate* gates, uint32_t gate_count, int sum, uint64_t wait_ns) {
  if (World::strikes(World::get().control->fail_launch)) return fail(BATON_GPU_FAILED, "the kernel does not start");
  for (uint32_t i = 0; i < piece_count; ++i) {
    const BatonGpuPiece& piece = pieces[i];
    const std::uint64_t all = piece.from | piece.to | piece.from_row | piece.to_row | piece.from_group |
                              piece.to_group | piece.row_bytes | piece.position;
    if (all % BATON_GPU_ALIGN != 0 || piece.gate >= gate_count || piece.rows == 0 || piece.groups == 0) {
      misused("a piece is not made of whole 16 bytes, or is empty");
    }
    const std::uint64_t span =
        (piece.groups - 1) * piece.from_group + (piece.rows - 1) * piece.from_row + piece.row_bytes;
    const BatonGpuGate& gate = gates[piece.gate];
    if (!Streams::get().is_released(piece.from, span, gate.release == 0 ? 0 : gate.release_min)) {
      return fail(BATON_GPU_INVALID, "a kernel reads memory that a stream writes, and does not wait for it");
    }
  }
  if (piece_count == 0 || piece_count > BATON_GPU_PIECES_MAX || gate_count == 0 || gate_count > BATON_GPU_GATES_MAX) {
    misused("a launch has too many pieces or gates, or none");
  }
  {
    const std::lock_guard held(queue->lock);
    if (++queue->under_way > BATON_GPU_LAUNCHES_MAX) misused("too many launches have not ended");
    queue->work.push_back(
        {{pieces, pieces + piece_count}, {gates, gates + gate_count}, sum != 0, std::chrono::nanoseconds(wait_ns)});
  }
  queue->changed.notify_all();
  return BATON_GPU_OK;
}

BatonGpuStatus baton_gpu_ended(BatonGpuQueue* queue, BatonGpuResult* results, uint32_t* gate_count,
                               uint64_t* device_ns) {
  *gate_count = 0;
  const std::lock_guard held(queue->lock);
  if (queue->done.empty()) return BATON_GPU_OK;
  const Done done = std::move(queue->done.front());
  queue->done.pop_front();
  --queue->under_way;
  if (done.failed) return fail(BATON_GPU_FAILED, "the launch failed: an illegal memory access was encountered");
  std::copy(done.results.begin(), done.results.end(), results);
  *gate_count = static_cast<uint32_t>(done.results.size());
  *device_ns = 1000;
  return BATON_GPU_OK;
}

// ---------------------------------------------------------------- copies between the host and the device

BatonGpuStatus baton_gpu_copies_open(BatonGpu*, BatonGpuCopied copied, void* context, BatonGpuCopies** copies) {
  *copies = new BatonGpuCopies;
  (*copies)->copied = copied;
  (*copies)->context = context;
  (*copies)->thread = std::thread(&BatonGpuCopies::run, *copies);
  ++World::get().counts->engines;
  return BATON_GPU_OK;
}

void baton_gpu_copies_close(BatonGpuCopies* copies) {
  {
    const std::lock_guard held(copies->lock);
    copies->closing = true;
  }
  copies->changed.notify_all();
  copies->thread.join();
  delete copies;
  --World::get().counts->engines;
}

BatonGpuStatus baton_gpu_copies_pin(BatonGpuCopies* copies, uint64_t address, uint64_t) {
  if (Word& left = World::get().control->no_pin; left > 0) {
    --left;
    return fail(BATON_GPU_NO_MEMORY, "the memory cannot be pinned");
  }
  const std::lock_guard held(copies->lock);
  copies->pinned.insert(address);
  ++World::get().counts->pinned;
  return BATON_GPU_OK;
}

BatonGpuStatus baton_gpu_copies_unpin(BatonGpuCopies* copies, uint64_t address) {
  const std::lock_guard held(copies->lock);
  if (copies->pinned.erase(address) == 0) misused("memory that is not pinned is released");
  --World::get().counts->pinned;
  return BATON_GPU_OK;
}

BatonGpuStatus baton_gpu_copies_start(BatonGpuCopies* copies, uint64_t ticket, BatonGpuDirection direction,
                                      const BatonGpuCopy* batch, uint32_t count, int ordered, uint64_t after) {
  World& world = World::get();
  if (World::strikes(world.control->fail_start)) return fail(BATON_GPU_FAILED, "the batch of copies is refused");
  Streams& streams = Streams::get();
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t device = direction == BATON_GPU_TO_HOST ? batch[i].from : batch[i].to;
    if (!streams.is_ordered(device, batch[i].bytes, ordered != 0, after)) {
      return fail(BATON_GPU_INVALID, "a copy is not ordered after the last write of its memory");
    }
  }
  const auto due = std::chrono::steady_clock::now() + std::chrono::milliseconds(world.control->delay_ms);
  const uint64_t after_work = ordered != 0 ? streams.submitted() : 0;
  {
    const std::lock_guard held(copies->lock);
    copies->batches.push_back({ticket, after_work, {batch, batch + count}, due});
  }
  copies->changed.notify_all();
  return BATON_GPU_OK;
}

BatonGpuStatus baton_gpu_copies_check(BatonGpuCopies* copies) {
  const std::lock_guard held(copies->lock);
  if (copies->failed) return fail(BATON_GPU_FAILED, "copies failed: an illegal memory access was encountered");
  return BATON_GPU_OK;
}

// For tests, which an engine's streams are. `from` 0: the caller has written the bytes.
void fake_gpu_write(uint64_t stream, uint64_t to, uint64_t from, uint64_t bytes) {
  const auto* const data = reinterpret_cast<const std::uint8_t*>(from);
  Streams::get().write(stream, to, bytes, from == 0 ? std::vector<std::uint8_t>{} : std::vector(data, data + bytes));
}

// For tests: lets memory of this process, whole pages, stand for memory of the device, which other processes can map.
// Its bytes stay. Nothing may write there meanwhile.
void fake_gpu_adopt(uint64_t address, uint64_t bytes) {
  World& world = World::get();
  const int fd = ::memfd_create("fake-gpu", MFD_CLOEXEC);
  void* const at = reinterpret_cast<void*>(address);
  if (fd < 0 || ::write(fd, at, bytes) != static_cast<ssize_t>(bytes) ||
      ::mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    misused("memory cannot be adopted");
  }
  const std::lock_guard held(world.lock);
  world.memory[address] = {bytes, static_cast<std::uint8_t*>(at), fd, 0};
}

// For the stand-in for adapters: the memory behind an address; null for none of the device's.
void* fake_gpu_behind(uint64_t address, uint64_t bytes) {
  World& world = World::get();
  const std::lock_guard held(world.lock);
  const auto at = world.find(address, bytes);
  return at == world.memory.end() ? nullptr : at->second.backing + (address - at->first);
}

// For tests: all streams have been waited for.
void fake_gpu_synchronise(void) {
  Streams::get().forget();
}

}  // extern "C"
