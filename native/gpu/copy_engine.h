// Batches of copies between host memory and a device's memory, asynchronous and announced by a descriptor.
//
//    submit ─▶ (the work that is in the stream `after`) ─▶ copies, in any order ─▶ the descriptor ─▶ take
//
// What carries them out is a backend: a thread that calls memcpy, or CUDA.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gpu/device.h"

namespace baton::gpu {

using Copy = BatonGpuCopy;
using Ticket = std::uint64_t;
using OnEnded = std::function<void(Ticket)>;

class CopyBackend {
 public:
  // A fence: every batch has ended.
  virtual ~CopyBackend() = default;
  virtual void pin(std::uint64_t address, std::uint64_t bytes) = 0;
  virtual void unpin(std::uint64_t address) = 0;
  // Copies the descriptors. Throws Error where it does not start, and then none of the copies runs any more.
  virtual void start(Ticket ticket, BatonGpuDirection direction, std::span<const Copy> copies,
                     std::optional<std::uint64_t> after) = 0;
  // Throws Error if the device has failed, so that no batch ends any more.
  virtual void check() = 0;
};

using MakeBackend = std::function<std::unique_ptr<CopyBackend>(OnEnded)>;

// The device's memory is memory of this process, too; its writers have ended when they submit, so `after` is ignored.
MakeBackend host_copies();
MakeBackend device_copies(std::shared_ptr<Device> device);

// May be used from any thread. All calls but `take` and `wait` throw Error where the device refuses, and
// std::invalid_argument where the caller is wrong.
class CopyEngine {
 public:
  static constexpr std::size_t kCopiesMax = std::size_t{1} << 16;  // Of a batch.
  static constexpr std::size_t kBatchesMax = 1024;                 // That have not been taken.

  explicit CopyEngine(const MakeBackend& make);
  // A fence: nothing of it reads or writes afterwards.
  ~CopyEngine();
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  // Readable when `take` should be called.
  [[nodiscard]] int fd() const { return fd_; }
  // Registers host memory, whole pages, which must outlive its registration.
  void add_host(std::uint64_t address, std::uint64_t bytes);
  // Refused while batches use it.
  void remove_host(std::uint64_t address);
  // Each copy has one end in registered memory, the same one for all of them. Bytes are read and written at any time
  // until the batch has ended, and not before the work now in the stream `after` has ended. Batches may end in any
  // order.
  Ticket submit(std::span<const Copy> copies, std::optional<std::uint64_t> after);
  struct Ended {
    Ticket ticket = 0;
    std::string failure;  // Empty if all bytes were copied.
  };
  // Returns the batches that have ended since the last call. Finds a device that has failed, which is announced by
  // nothing: callers call this at their deadlines as well.
  std::vector<Ended> take();
  // Waits until the batch has ended; false where it has not in time. `take` still returns it.
  bool wait(Ticket ticket, std::chrono::nanoseconds timeout);

 private:
  struct Host {
    std::uint64_t bytes = 0;
    std::size_t batches = 0;  // Those under way that use it.
  };
  struct Batch {
    std::vector<std::uint64_t> hosts;  // Addresses of the registered memory that it uses.
  };

  BatonGpuDirection direction_of(std::span<const Copy> copies, Batch& batch) const;
  const std::pair<const std::uint64_t, Host>* find_host(std::uint64_t address, std::uint64_t bytes) const;
  void end(Ticket ticket, const std::string& failure);
  void forget(std::map<Ticket, Batch>::iterator at);
  void check();

  int fd_ = -1;
  std::mutex lock_;  // Guards all below but the backend.
  std::condition_variable changed_;
  std::map<std::uint64_t, Host> hosts_;  // By address; they do not overlap.
  std::map<Ticket, Batch> under_way_;
  std::vector<Ended> ended_;
  Ticket last_ = 0;
  std::unique_ptr<CopyBackend> backend_;  // Last: it ends first.
};

}  // namespace baton::gpu
