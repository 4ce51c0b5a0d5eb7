// A phase-fair lock: a reader waits for the writer's present batch at most, however fast the next one follows.
//
//   writer   ▓▓▓▓ batch ▓▓▓▓          ▓▓▓▓ batch ▓▓▓▓
//   reader         └─ comes, waits ─▶ reads ─▶
//
// A reader that comes during a batch is counted before it waits, so the writer's next batch begins behind it.
// Readers that come while the writer waits for them wait in turn, so the writer is not starved either. Batches and
// matches are microseconds, so both sides spin, and yield where that does not help.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace baton::radix {

// One writer at a time: writers agree among themselves by a mutex of their own.
class BatchLock {
 public:
  void lock() {
    phase_ ^= kPhase;
    const std::uint32_t readers = entered_.fetch_add(kPresent | phase_, std::memory_order_acq_rel);
    wait([&] { return left_.load(std::memory_order_acquire) == readers; });
  }

  void unlock() { entered_.fetch_and(~kWriterBits, std::memory_order_release); }

  bool try_lock_shared() {
    std::uint32_t entered = entered_.load(std::memory_order_relaxed);
    while ((entered & kWriterBits) == 0) {
      if (entered_.compare_exchange_weak(entered, entered + kReader, std::memory_order_acquire)) return true;
    }
    return false;
  }

  void lock_shared() {
    const std::uint32_t writer = entered_.fetch_add(kReader, std::memory_order_acquire) & kWriterBits;
    if (writer != 0) wait([&] { return (entered_.load(std::memory_order_acquire) & kWriterBits) != writer; });
  }

  void unlock_shared() { left_.fetch_add(kReader, std::memory_order_release); }

 private:
  static constexpr std::uint32_t kPresent = 1, kPhase = 2, kWriterBits = 3, kReader = 4;
  static constexpr int kSpins = 2048;

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

  // Readers that came, and in the lowest bits whether a batch runs, and an odd or an even one. Both counts wrap alike.
  alignas(64) std::atomic<std::uint32_t> entered_{0};
  alignas(64) std::atomic<std::uint32_t> left_{0};
  std::uint32_t phase_ = 0;
};

}  // namespace baton::radix
