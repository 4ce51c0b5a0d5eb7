// Batches of copies from several threads, over a thread of the host and over the stand-in for GPUs.
#include <poll.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <thread>

#include "gpu/copy_engine.h"
#include "tests/check.h"

namespace gpu = baton::gpu;

namespace {

constexpr std::size_t kPage = 4096, kPages = 16;

struct Pages {
  void* memory = ::operator new(kPages * kPage, std::align_val_t(kPage));
  ~Pages() { ::operator delete(memory, std::align_val_t(kPage)); }
  [[nodiscard]] std::uint64_t at(std::size_t page) const {
    return reinterpret_cast<std::uint64_t>(memory) + page * kPage;
  }
  [[nodiscard]] std::uint8_t* bytes(std::size_t page) const { return reinterpret_cast<std::uint8_t*>(at(page)); }
};

// Each thread copies its own pages there and back; one thread takes what has ended.
void copy_from_threads(const gpu::MakeBackend& make) {
  constexpr int kThreads = 3, kRounds = 100;
  Pages host, cache;
  std::memset(host.memory, 0, kPages * kPage);
  gpu::CopyEngine engine(make);
  engine.add_host(host.at(0), kPages * kPage);
  std::atomic<int> right = 0;
  std::vector<std::thread> threads;
  for (int number = 0; number < kThreads; ++number) {
    threads.emplace_back([&, number] {
      const std::size_t first = 2 * static_cast<std::size_t>(number), second = first + 1;
      for (int round = 0; round < kRounds; ++round) {
        std::memset(cache.bytes(first), round, kPage);
        const gpu::Copy out{host.at(first), cache.at(first), kPage}, back{cache.at(second), host.at(first), kPage};
        const bool ended = engine.wait(engine.submit({&out, 1}, std::nullopt), std::chrono::seconds(20)) &&
                           engine.wait(engine.submit({&back, 1}, std::nullopt), std::chrono::seconds(20));
        right += ended && cache.bytes(second)[kPage - 1] == static_cast<std::uint8_t>(round);
      }
    });
  }
  std::size_t ended = 0;
  while (ended < 2 * kThreads * kRounds) {
    pollfd waiting{engine.fd(), POLLIN, 0};
    CHECK(::poll(&waiting, 1, 20'000) == 1);
    for (const auto& one : engine.take()) {
      CHECK(one.failure.empty());
      ++ended;
    }
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(right == kThreads * kRounds);
}

}  // namespace

TEST(copies_of_several_threads_end_each_for_itself_on_the_host) {
  copy_from_threads(gpu::host_copies());
}

TEST(copies_of_several_threads_end_each_for_itself_on_a_device) {
  copy_from_threads(gpu::device_copies(std::make_shared<gpu::Device>(FAKE_GPU, 0)));
}

TEST(an_engine_that_is_destroyed_has_copied_all) {
  Pages host, cache;
  std::memset(cache.memory, 7, kPages * kPage);
  std::memset(host.memory, 0, kPages * kPage);
  {
    gpu::CopyEngine engine(gpu::device_copies(std::make_shared<gpu::Device>(FAKE_GPU, 0)));
    engine.add_host(host.at(0), kPages * kPage);
    for (std::size_t page = 0; page < kPages; ++page) {
      const gpu::Copy copy{host.at(page), cache.at(page), kPage};
      engine.submit({&copy, 1}, std::nullopt);
    }
  }
  CHECK(std::memcmp(host.memory, cache.memory, kPages * kPage) == 0);
}
