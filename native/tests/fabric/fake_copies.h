// The copy engine of fake_gpu.cpp, and the streams of an engine that writes what is copied.
//
// Copies read and write at their end, so that memory which is reused before shows wrong bytes. A real stream's order
// cannot be shown here, so it is demanded: a test says which stream writes which memory (fake_gpu_write), and a copy of
// that memory which is not ordered after that stream is refused, as is a kernel that reads it without waiting for a
// release (write_after) that came after the write. An end that is no memory of the "device" is memory of
// this process: the tensors of an engine on the CPU stand for its device.
#pragma once

#include <sys/uio.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <set>
#include <thread>
#include <vector>

#include "gpu/baton_gpu.h"
#include "tests/fabric/device_memory.h"

namespace baton::tests {
namespace {

// Work of an engine's streams, all in one order.
class Streams {
 public:
  static Streams& get() {
    static Streams* streams = new Streams;
    return *streams;
  }

  // Empty `bytes`: the test writes itself.
  void write(std::uint64_t stream, std::uint64_t to, std::uint64_t size, std::vector<std::uint8_t> bytes) {
    const std::lock_guard held(lock_);
    if (!running_) std::thread(&Streams::run, this).detach();
    running_ = true;
    size_max_ = std::max(size_max_, size);
    auto at = last_writes_.lower_bound(to);
    while (at != last_writes_.end() && at->first + at->second.size <= to + size) at = last_writes_.erase(at);
    last_writes_[to] = {.size = size, .stream = stream};
    if (bytes.empty()) return;
    work_.push_back({to, std::move(bytes)});
    ++submitted_;
    changed_.notify_all();
  }
  bool is_ordered(std::uint64_t address, std::uint64_t size, bool ordered, std::uint64_t after) {
    const std::lock_guard held(lock_);
    auto at = last_writes_.lower_bound(address < size_max_ ? 0 : address - size_max_);
    for (; at != last_writes_.end() && at->first < address + size; ++at) {
      const bool overlaps = at->first + at->second.size > address;
      if (overlaps && !(ordered && after == at->second.stream)) return false;
    }
    return true;
  }
  // What the stream has written by now is released with this value.
  void release(std::uint64_t stream, std::uint64_t value) {
    const std::lock_guard held(lock_);
    for (auto& [address, written] : last_writes_) {
      if (written.stream == stream && written.released == 0) written.released = value;
    }
  }
  // Whether a kernel that waits for `release_min`, 0: for nothing, may read this.
  bool is_released(std::uint64_t address, std::uint64_t size, std::uint64_t release_min) {
    const std::lock_guard held(lock_);
    auto at = last_writes_.lower_bound(address < size_max_ ? 0 : address - size_max_);
    for (; at != last_writes_.end() && at->first < address + size; ++at) {
      const bool overlaps = at->first + at->second.size > address;
      if (overlaps && (at->second.released == 0 || release_min < at->second.released)) return false;
    }
    return true;
  }
  std::uint64_t submitted() {
    const std::lock_guard held(lock_);
    return submitted_;
  }
  bool has_done(std::uint64_t count) {
    const std::lock_guard held(lock_);
    return done_ >= count;
  }
  void forget() {
    const std::lock_guard held(lock_);
    last_writes_.clear();
  }
  // Something else than a stream has written there.
  void forget(std::uint64_t address, std::uint64_t size) {
    const std::lock_guard held(lock_);
    auto at = last_writes_.lower_bound(address < size_max_ ? 0 : address - size_max_);
    while (at != last_writes_.end() && at->first < address + size) {
      at = at->first + at->second.size > address ? last_writes_.erase(at) : std::next(at);
    }
  }
  // Wait for all writes, as freeing memory of a GPU does.
  void drain() {
    std::unique_lock held(lock_);
    changed_.notify_all();
    drained_.wait(held, [&] { return work_.empty(); });
  }

 private:
  struct Write {
    std::uint64_t to;
    std::vector<std::uint8_t> bytes;
  };
  struct Written {
    std::uint64_t size = 0, stream = 0;
    std::uint64_t released = 0;  // 0: nothing was posted after it.
  };

  void run() {
    World& world = World::get();
    std::unique_lock held(lock_);
    while (true) {
      while (!work_.empty() && world.control->hold_streams == 0) {
        const Write& next = work_.front();
        std::memcpy(world.anywhere(next.to, next.bytes.size()), next.bytes.data(), next.bytes.size());
        work_.pop_front();
        ++done_;
      }
      if (work_.empty()) drained_.notify_all();
      changed_.wait_for(held, std::chrono::milliseconds(work_.empty() ? 1000 : 1));
    }
  }

  std::mutex lock_;
  std::condition_variable changed_, drained_;
  std::deque<Write> work_;
  std::map<std::uint64_t, Written> last_writes_;  // By address.
  std::uint64_t size_max_ = 0, submitted_ = 0, done_ = 0;
  bool running_ = false;
};

}  // namespace
}  // namespace baton::tests

struct BatonGpuCopies {
  struct Batch {
    std::uint64_t ticket = 0, after_work = 0;
    std::vector<BatonGpuCopy> copies;
    std::chrono::steady_clock::time_point due;
  };

  BatonGpuCopied copied = nullptr;
  void* context = nullptr;
  std::mutex lock;
  std::condition_variable changed;
  std::deque<Batch> batches;
  std::set<std::uint64_t> pinned;
  bool failed = false, closing = false;
  std::thread thread;

  // The batch whose turn it is, or none. On a GPU those of one direction follow each other; the interface promises no
  // order, and a test may ask for the newest first.
  std::deque<Batch>::iterator next(baton::tests::World& world) {
    if (failed || batches.empty() || world.control->hold_copies != 0) return batches.end();
    const auto at = world.control->reorder_copies != 0 ? std::prev(batches.end()) : batches.begin();
    const bool ready =
        std::chrono::steady_clock::now() >= at->due && baton::tests::Streams::get().has_done(at->after_work);
    return ready ? at : batches.end();
  }

  void run() {
    baton::tests::World& world = baton::tests::World::get();
    std::unique_lock held(lock);
    while (!closing || (!batches.empty() && !failed)) {
      const auto at = next(world);
      if (at == batches.end()) {
        changed.wait_for(held, std::chrono::milliseconds(batches.empty() ? 1000 : 1));
        continue;
      }
      const Batch now = std::move(*at);
      batches.erase(at);
      if (baton::tests::World::strikes(world.control->fail_copies)) {
        failed = true;
        continue;
      }
      held.unlock();
      for (std::size_t i = now.copies.size(); i-- > 0;) carry_out(world, now.copies[i]);
      ++world.counts->batches;
      copied(context, now.ticket);
      held.lock();
    }
  }

  // Through the kernel, so that bytes which their owner overwrites meanwhile are no race for a sanitizer to find: tests
  // do so to show what comes of it.
  static void carry_out(baton::tests::World& world, const BatonGpuCopy& copy) {
    std::vector<std::uint8_t> bytes(copy.bytes);
    const iovec local{bytes.data(), copy.bytes}, remote{world.anywhere(copy.from, copy.bytes), copy.bytes};
    if (::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0) != static_cast<ssize_t>(copy.bytes)) {
      baton::tests::misused("memory that is copied cannot be read");
    }
    std::memcpy(world.anywhere(copy.to, copy.bytes), bytes.data(), copy.bytes);
    ++world.counts->copies;
  }
};
