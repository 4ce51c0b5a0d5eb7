// A C++ wrapper of baton_gpu.h's library: loaded at run time, with RAII owners, and exceptions for statuses.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpu/baton_gpu.h"

namespace baton::gpu {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// No GPU can be used on this host: no library in this build, no driver, or no GPU.
struct Unavailable : Error {
  using Error::Error;
};

struct Calls {
  decltype(&baton_gpu_abi) abi;
  decltype(&baton_gpu_why) why;
  decltype(&baton_gpu_open) open;
  decltype(&baton_gpu_close) close;
  decltype(&baton_gpu_name) name;
  decltype(&baton_gpu_allocate) allocate;
  decltype(&baton_gpu_free) free;
  decltype(&baton_gpu_copy) copy;
  decltype(&baton_gpu_fill) fill;
  decltype(&baton_gpu_range) range;
  decltype(&baton_gpu_share) share;
  decltype(&baton_gpu_map) map;
  decltype(&baton_gpu_unmap) unmap;
  decltype(&baton_gpu_dma_buf) dma_buf;
  decltype(&baton_gpu_flush) flush;
  decltype(&baton_gpu_write) write;
  decltype(&baton_gpu_write_after) write_after;
  decltype(&baton_gpu_queue_open) queue_open;
  decltype(&baton_gpu_queue_close) queue_close;
  decltype(&baton_gpu_queue_scratch) queue_scratch;
  decltype(&baton_gpu_queue_fd) queue_fd;
  decltype(&baton_gpu_launch) launch;
  decltype(&baton_gpu_ended) ended;
  decltype(&baton_gpu_copies_open) copies_open;
  decltype(&baton_gpu_copies_close) copies_close;
  decltype(&baton_gpu_copies_pin) copies_pin;
  decltype(&baton_gpu_copies_unpin) copies_unpin;
  decltype(&baton_gpu_copies_start) copies_start;
  decltype(&baton_gpu_copies_check) copies_check;
};

// A descriptor of device memory for an adapter, see baton_gpu_dma_buf.
class DmaBuf {
 public:
  DmaBuf(int fd, std::uint64_t offset) : fd_(fd), offset_(offset) {}
  ~DmaBuf();
  DmaBuf(const DmaBuf&) = delete;
  DmaBuf& operator=(const DmaBuf&) = delete;

  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] std::uint64_t offset() const { return offset_; }

 private:
  int fd_;
  std::uint64_t offset_;
};

// All calls of this class and of those below throw Error.
class Device {
 public:
  // `library`: its file; if empty, the one beside this program or module, provided that the host has a driver.
  Device(const std::string& library, int number);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // A description such as "NVIDIA H200, sm_90, 132 multiprocessors".
  [[nodiscard]] std::string name() const { return calls_.name(gpu_); }
  void copy(std::uint64_t to, std::uint64_t from, std::uint64_t bytes);
  void fill(std::uint64_t address, std::uint8_t value, std::uint64_t bytes);
  void write(std::uint64_t address, std::uint64_t value);
  void write_after(std::uint64_t stream, std::uint64_t address, std::uint64_t value);
  struct Range {
    std::uint64_t base = 0;
    std::uint64_t bytes = 0;
    // Whether the whole range [address, address + count) lies in it.
    [[nodiscard]] bool holds(std::uint64_t address, std::uint64_t count) const {
      return address >= base && count <= bytes && address - base <= bytes - count;
    }
  };
  [[nodiscard]] Range range(std::uint64_t address);
  [[nodiscard]] BatonGpuHandle share(std::uint64_t base);
  [[nodiscard]] DmaBuf dma_buf(std::uint64_t address, std::uint64_t bytes);
  void flush();

 private:
  friend class Memory;
  friend class Mapping;
  friend class Queue;
  friend class DeviceCopies;
  void check(BatonGpuStatus status) const;

  Calls calls_{};
  BatonGpu* gpu_ = nullptr;
};

// Device memory owned by this process.
class Memory {
 public:
  Memory(std::shared_ptr<Device> device, std::uint64_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] Device& device() const { return *device_; }
  [[nodiscard]] std::uint64_t address() const { return address_; }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<Device> device_;
  std::uint64_t address_ = 0;
  std::uint64_t bytes_;
};

// Memory that another process allocated, mapped into this one.
class Mapping {
 public:
  Mapping(Device& device, const BatonGpuHandle& handle);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping();

  [[nodiscard]] const Device::Range& range() const { return range_; }

 private:
  Device* device_;
  Device::Range range_;
};

// Chunks in flight: all chunks added during a launch go together in the next launch.
//
// Its destruction is a fence: afterwards nothing of it writes.
class Queue {
 public:
  explicit Queue(Device& device);
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // Readable when `take` should be called.
  [[nodiscard]] int fd() const { return device_.calls_.queue_fd(queue_); }
  // Device memory for this queue's launches, BATON_GPU_SCRATCH_BYTES.
  [[nodiscard]] std::uint64_t scratch() const { return device_.calls_.queue_scratch(queue_); }
  // Whether a chunk of this many pieces may be added now; a new queue takes BATON_GPU_PIECES_MAX.
  [[nodiscard]] bool has_room(std::size_t pieces) const;
  // Sets the gate of each of the `pieces`.
  void add(const BatonGpuGate& gate, std::span<const BatonGpuPiece> pieces, void* tag);
  // Launches the added chunks, unless enough launches are in flight.
  void launch(bool sums);
  struct Ended {
    void* tag = nullptr;
    BatonGpuResult result{};
  };
  // Appends the chunks that have ended, in the order in which they were added.
  void take(std::vector<Ended>& ended);
  // Total duration of all launches so far.
  [[nodiscard]] std::uint64_t device_ns() const { return device_ns_; }
  [[nodiscard]] std::uint64_t launches() const { return launches_; }

 private:
  Device& device_;
  BatonGpuQueue* queue_ = nullptr;
  std::vector<BatonGpuPiece> pieces_;
  std::vector<BatonGpuGate> gates_;
  std::vector<void*> tags_;
  std::deque<std::vector<void*>> under_way_;
  std::uint64_t device_ns_ = 0;
  std::uint64_t launches_ = 0;
};

}  // namespace baton::gpu
