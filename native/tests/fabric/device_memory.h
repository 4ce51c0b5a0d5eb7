// The memory of this process that is on a "device", for fake_gpu.cpp, with what tests set and count.
//
// An address is only reserved, so that code that uses it as a pointer crashes; behind it lies a file in
// memory that other processes map as well, and which outlives its process while they do.
//
// Internal linkage, as two of these stand-ins may be loaded into one process.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>

#include "tests/fabric/tables.h"

namespace baton::tests {
namespace {

struct Control {
  Word no_driver, no_device, no_share, no_map;  // Failures of the driver, a device, sharing, mapping.
  Word delay_ms;        // Delay of each launch and each batch of copies; its bytes move at the end of it.
  Word hold;            // Launches do not begin while it is set.
  Word hold_streams;    // Nothing in a caller's stream ends while it is set.
  Word fail_launch;     // The n-th launch from now on is refused.
  Word fail_run;        // The n-th launch from now on fails on the device.
  Word stale;           // The n-th chunk with an epoch from now on finds it changed.
  Word corrupt;         // The n-th chunk from now on arrives with a byte changed.
  Word hold_copies;     // Batches of copies do not begin while it is set.
  Word reorder_copies;  // The newest batch is next, not the oldest.
  Word no_pin;          // Host memory cannot be pinned, n times from now on.
  Word fail_start;      // The n-th batch from now on is refused.
  Word fail_copies;     // The n-th batch from now on fails the device: none ends any more.
  Word no_dma_buf;      // The driver makes none.
  Word no_flush;        // Writes of adapters cannot be waited for …
  Word lose_flush;      // … or are not, although that is said.
};

struct Counts {
  Word devices, allocations, mappings, queues, engines, pinned;  // Open.
  Word launches, chunks, not_ready, stale, batches, copies;
};

struct Allocation {
  std::uint64_t bytes = 0;
  std::uint8_t* backing = nullptr;
  int fd = -1;  // -1: of another process.
  int mapped = 0;
  bool freed = false;
};

// All memory of this process that is on the "device", by address.
class World {
 public:
  static World& get() {
    static World* world = new World;
    return *world;
  }

  Control* control;
  Counts* counts;
  std::mutex lock;
  std::map<std::uint64_t, Allocation> memory;

  std::uint64_t add(std::uint64_t bytes, int fd, bool own) {
    void* backing = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    void* reserved = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (backing == MAP_FAILED || reserved == MAP_FAILED) return 0;
    const auto base = reinterpret_cast<std::uint64_t>(reserved);
    const std::lock_guard held(lock);
    memory[base] = {bytes, static_cast<std::uint8_t*>(backing), own ? fd : -1, own ? 0 : 1};
    return base;
  }
  void remove(std::map<std::uint64_t, Allocation>::iterator at) {
    ::munmap(at->second.backing, at->second.bytes);
    ::munmap(reinterpret_cast<void*>(at->first), at->second.bytes);
    if (at->second.fd >= 0) ::close(at->second.fd);
    memory.erase(at);
  }
  // End where nothing is there. Under the lock.
  std::map<std::uint64_t, Allocation>::iterator find(std::uint64_t address, std::uint64_t bytes = 1) {
    auto at = memory.upper_bound(address);
    if (at == memory.begin()) return memory.end();
    --at;
    const std::uint64_t offset = address - at->first;
    return bytes <= at->second.bytes && offset <= at->second.bytes - bytes ? at : memory.end();
  }
  // Memory behind an address that a kernel uses.
  std::uint8_t* behind(std::uint64_t address, std::uint64_t bytes) {
    const std::lock_guard held(lock);
    const auto at = find(address, bytes);
    if (at == memory.end()) misused("an illegal address was used on the device");
    return at->second.backing + (address - at->first);
  }
  // The same, or memory of the host.
  std::uint8_t* anywhere(std::uint64_t address, std::uint64_t bytes) {
    const std::lock_guard held(lock);
    const auto at = find(address, bytes);
    return at == memory.end() ? reinterpret_cast<std::uint8_t*>(address) : at->second.backing + (address - at->first);
  }
  std::atomic<std::uint64_t>& word(std::uint64_t address) {
    return *reinterpret_cast<std::atomic<std::uint64_t>*>(behind(address, sizeof(std::uint64_t)));
  }
  static bool strikes(Word& countdown) { return countdown > 0 && --countdown == 0; }

 private:
  World() {
    const std::string folder = folder_of("FAKE_GPU_DIR");
    control = map_file<Control>(folder + "/control", O_CREAT);
    counts = map_file<Counts>(folder + "/" + std::to_string(::getpid()), O_CREAT);
    if (control == nullptr || counts == nullptr) misused("FAKE_GPU_DIR cannot be used");
  }
};

}  // namespace
}  // namespace baton::tests
