// A phase-fair lock: a reader waits for the writer's current batch at most, however soon the next one follows.
//
//   writer   ▓▓▓▓ batch ▓▓▓▓          ▓▓▓▓ batch ▓▓▓▓
//   reader         └─ enters, waits ▶ reads ─▶
//
// A reader that enters during a batch is counted before it waits, so the writer's next batch begins after it.
// Readers that enter while the writer waits for earlier ones wait in turn, so the writer does not starve either.
// Batches and matches take microseconds, so both sides spin, and yield if spinning takes too long.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace baton::radix {

// For one writer at a time: callers serialise writers by a mutex of their own.
class BatchLock {
 public:
  void lock() {
    phase_ ^= kPhase;
    const std::uint32_t readers = entered_.fetch_add(kPresent | phase_, std::memory_order_acq_rel);
    wait([&] { return left_.load(std::memory_order_acquire) == readers; });
  }

  void unlock() { entered_.fetch_and(~kWriterBits, std::memory_order_release); }

  // A reader's three steps. `enter` counts it and returns the batch to wait for. `spin` waits for as long as a batch
  // should take and returns whether that batch has ended. `wait` waits until it has.
  std::uint32_t enter_shared() { return entered_.fetch_add(kReader, std::memory_order_acquire) & kWriterBits; }
  bool spin_shared(std::uint32_t writer) const {
    for (int spins = 0; !is_open(writer); ++spins) {
      if (spins == kSpins) return false;
      __builtin_ia32_pause();
    }
    return true;
  }
  void wait_shared(std::uint32_t writer) const {
    wait([&] { return is_open(writer); });
  }
  void lock_shared() { wait_shared(enter_shared()); }

  void unlock_shared() { left_.fetch_add(kReader, std::memory_order_release); }

 private:
  static constexpr std::uint32_t kPresent = 1, kPhase = 2, kWriterBits = 3, kReader = 4;
  static constexpr int kSpins = 1024;

  bool is_open(std::uint32_t writer) const {
    return writer == 0 || (entered_.load(std::memory_order_acquire) & kWriterBits) != writer;
  }

  template <class Done>
  static void wait(Done done) {
    for (int spins = 0; !done(); ++spins) {
      if (spins < kSpins) {
        __builtin_ia32_pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

  // Number of readers that entered; the lowest bits tell whether a batch runs and its parity. Both counts wrap alike.
  alignas(64) std::atomic<std::uint32_t> entered_{0};
  alignas(64) std::atomic<std::uint32_t> left_{0};
  std::uint32_t phase_ = 0;
};

}  // namespace baton::radix
