// The library's use of CUDA's runtime and driver, apart from launches: errors, the device, mapped memory.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <sys/random.h>

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "gpu/baton_gpu.h"

namespace {

thread_local std::string why;

// The exception for a failed call, caught at the library's boundary.
struct Failure {
  BatonGpuStatus status;
  std::string why;
};

BatonGpuStatus status_of(cudaError_t error) {
  switch (error) {
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
      return BATON_GPU_NO_DRIVER;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
      return BATON_GPU_NO_DEVICE;
    case cudaErrorMemoryAllocation:
      return BATON_GPU_NO_MEMORY;
    case cudaErrorInvalidValue:
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureIsolation:
      return BATON_GPU_INVALID;
    default:
      return BATON_GPU_FAILED;
  }
}

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // Otherwise the next call reports the error again.
  throw Failure{status_of(error), std::string(what) + ": " + cudaGetErrorString(error)};
}

template <class Body>
BatonGpuStatus guarded(const Body& body) {
  try {
    body();
    return BATON_GPU_OK;
  } catch (const Failure& failure) {
    why = failure.why;
    return failure.status;
  } catch (const std::bad_alloc&) {
    why = "no host memory";
    return BATON_GPU_NO_MEMORY;
  }
}

// Driver functions that the runtime lacks. A system-wide fence of the stream's earlier work precedes the write, which
// needs no multiprocessor, so a busy GPU does not delay it.
struct Driver {
  int (*get_context)(void** context);
  int (*set_context)(void* context);
  int (*get_address_range)(unsigned long long* base, std::size_t* bytes, unsigned long long address);
  int (*write_value)(cudaStream_t stream, unsigned long long address, std::uint64_t value, unsigned flags);
  // Null before CUDA 11.7.
  int (*get_range_handle)(void* handle, unsigned long long address, std::size_t bytes, int type,
                          unsigned long long flags);
};

const Driver& driver() {
  static const auto found = [] {
    Driver calls{};
    if (void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
      calls.get_context = reinterpret_cast<decltype(calls.get_context)>(::dlsym(library, "cuCtxGetCurrent"));
      calls.set_context = reinterpret_cast<decltype(calls.set_context)>(::dlsym(library, "cuCtxSetCurrent"));
      calls.get_address_range =
          reinterpret_cast<decltype(calls.get_address_range)>(::dlsym(library, "cuMemGetAddressRange_v2"));
      calls.write_value = reinterpret_cast<decltype(calls.write_value)>(::dlsym(library, "cuStreamWriteValue64_v2"));
      calls.get_range_handle =
          reinterpret_cast<decltype(calls.get_range_handle)>(::dlsym(library, "cuMemGetHandleForAddressRange"));
    }
    return calls;
  }();
  if (found.get_context == nullptr || found.set_context == nullptr || found.get_address_range == nullptr ||
      found.write_value == nullptr) {
    throw Failure{BATON_GPU_NO_DRIVER, "there is no NVIDIA driver here (libcuda.so.1), or one that is too old"};
  }
  return found;
}

// Makes the device's context current on this thread, and at the end again what was current before: the driver's own
// functions need one, and a thread that has used no CUDA has none. Restoring a device's number instead would create a
// context on GPU 0, of which such a thread has the number, too.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    if (driver().get_context(&before_) != 0) before_ = nullptr;
    check(cudaSetDevice(device), "the device cannot be used");
  }
  ~OnDevice() { driver().set_context(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  void* before_ = nullptr;
};

// Awaited KV takes precedence over the rest of an engine's step.
cudaStream_t make_urgent_stream() {
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "no stream priorities");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "no stream");
  return stream;
}

// Null if there is none.
template <class T>
std::unique_ptr<T> take_idle(std::mutex& lock, std::vector<std::unique_ptr<T>>& idle) {
  const std::lock_guard held(lock);
  if (idle.empty()) return nullptr;
  auto taken = std::move(idle.back());
  idle.pop_back();
  return taken;
}

using Process = std::array<std::uint8_t, 16>;

// Random: process ids mean nothing in another container.
const Process& this_process() {
  static const Process process = [] {
    Process random{};
    if (::getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) random[0] = 1;
    return random;
  }();
  return process;
}

struct Handle {
  cudaIpcMemHandle_t memory;
  Process process;
  std::uint64_t base;
};
static_assert(sizeof(Handle) <= sizeof(BatonGpuHandle));

Handle unpack(const BatonGpuHandle& packed) {
  Handle handle;
  std::memcpy(&handle, packed.bytes, sizeof handle);
  return handle;
}

// Memory that this process maps itself, when two of its agents connect: freed only after the last mapping has ended.
struct OwnMappings {
  struct Entry {
    int mapped = 0;
    bool freed = false;
  };
  std::mutex lock;
  std::map<std::uint64_t, Entry> entries;

  void add(std::uint64_t base) {
    const std::lock_guard held(lock);
    ++entries[base].mapped;
  }
  // False: the memory is not one of these.
  bool remove(std::uint64_t base) {
    const std::lock_guard held(lock);
    const auto at = entries.find(base);
    if (at == entries.end()) return false;
    if (--at->second.mapped > 0) return true;
    if (at->second.freed) cudaFree(reinterpret_cast<void*>(base));
    entries.erase(at);
    return true;
  }
  bool free_later(std::uint64_t base) {
    const std::lock_guard held(lock);
    const auto at = entries.find(base);
    if (at != entries.end()) at->second.freed = true;
    return at != entries.end();
  }
};

OwnMappings& own_mappings() {
  static OwnMappings mappings;
  return mappings;
}

void* as_pointer(std::uint64_t address) {
  return reinterpret_cast<void*>(address);
}

// Makes what comes next in `stream` begin once the work now in `theirs` (a cudaStream_t) has ended.
void wait_for_stream(cudaStream_t stream, std::uint64_t theirs) {
  const auto awaited = reinterpret_cast<cudaStream_t>(theirs);
  cudaStreamCaptureStatus capturing{};
  check(cudaStreamIsCapturing(awaited, &capturing), "the stream cannot be waited for");
  if (capturing != cudaStreamCaptureStatusNone) {
    throw Failure{BATON_GPU_INVALID, "the stream is being captured into a graph"};
  }
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "no event");
  cudaError_t error = cudaEventRecord(event, awaited);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(stream, event, 0);
  cudaEventDestroy(event);  // CUDA keeps the event until it has happened.
  check(error, "the stream cannot be waited for");
}

}  // namespace

struct BatonGpu {
  BatonGpu() = default;
  BatonGpu(const BatonGpu&) = delete;
  BatonGpu& operator=(const BatonGpu&) = delete;

  int device = 0;
  int processors = 0;
  std::string name;
  cudaStream_t now = nullptr;    // Stream of writes that wait for nothing.
  cudaStream_t after = nullptr;  // Stream of words that wait for other streams, in the order of the calls.

  std::mutex lock;
  std::vector<std::unique_ptr<BatonGpuQueue>> idle;  // Closed queues, for reuse; guarded by the lock.

  ~BatonGpu();
  void write(cudaStream_t stream, std::uint64_t address, std::uint64_t value) const {
    if (driver().write_value(stream, address, value, 0) != 0) throw Failure{BATON_GPU_FAILED, "the write fails"};
  }
  void range(std::uint64_t address, std::uint64_t& base, std::uint64_t& bytes) const {
    unsigned long long begin = 0;
    std::size_t size = 0;
    if (driver().get_address_range(&begin, &size, address) != 0) {
      throw Failure{BATON_GPU_INVALID, "the address does not lie in memory of this GPU"};
    }
    base = begin;
    bytes = size;
  }
  [[nodiscard]] int attribute(cudaDeviceAttr which) const {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device), "the GPU does not say what it can");
    return value;
  }
};
