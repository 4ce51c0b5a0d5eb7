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

  // A reader's three steps. `enter` counts it and returns whom it waits for, `spin` says whether that one has gone, for
  // as long as a batch should take, and `wait` waits for as long as it does take.
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

  // Readers that came, and in the lowest bits whether a batch runs, and an odd or an even one. Both counts wrap alike.
  alignas(64) std::atomic<std::uint32_t> entered_{0};
  alignas(64) std::atomic<std::uint32_t> left_{0};
  std::uint32_t phase_ = 0;
};

}  // namespace baton::radix
