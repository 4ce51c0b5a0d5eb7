// The library over CUDA's runtime, which is linked statically; the driver is looked for when a device is opened.
#include <memory>
#include <string>

#include "gpu/copies.cuh"
#include "gpu/queue.cuh"

namespace {

void check_device(BatonGpu& gpu) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, gpu.device), "the GPU does not say what it is");
  gpu.processors = properties.multiProcessorCount;
  gpu.name = std::string(properties.name) + ", sm_" + std::to_string(properties.major * 10 + properties.minor) + ", " +
             std::to_string(gpu.processors) + " multiprocessors";
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, move_pieces<true>) != cudaSuccess) {
    cudaGetLastError();
    throw Failure{BATON_GPU_NO_DEVICE,
                  "the kernels are not built for GPU " + std::to_string(gpu.device) + " (" + gpu.name + ")"};
  }
}

// Kernels are loaded when they are first used, which takes long, and must not wait for one that waits.
void warm_up(BatonGpu& gpu) {
  auto queue = open_queue(gpu);
  const auto scratch = reinterpret_cast<std::uint64_t>(queue->slots[0].device->scratch);
  const BatonGpuPiece piece{.from = scratch, .row_bytes = BATON_GPU_ALIGN, .rows = 1, .groups = 1};
  const BatonGpuGate gate{.epoch = scratch};
  launch(*queue, &piece, 1, &gate, 1, true, 0);
  launch(*queue, &piece, 1, &gate, 1, false, 0);
  check(cudaStreamSynchronize(queue->stream), "the kernel fails");
  close_queue(std::move(queue));
}

void open_peer(const BatonGpu& gpu, std::uint64_t base) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, as_pointer(base)), "the memory is unknown");
  if (attributes.device == gpu.device) return;
  const cudaError_t error = cudaDeviceEnablePeerAccess(attributes.device, 0);
  if (error != cudaSuccess) cudaGetLastError();
  if (error != cudaSuccess && error != cudaErrorPeerAccessAlreadyEnabled) {
    throw Failure{BATON_GPU_NOT_SHARED, "GPU " + std::to_string(gpu.device) + " does not reach GPU " +
                                            std::to_string(attributes.device) + ": " + cudaGetErrorString(error)};
  }
}

}  // namespace

extern "C" {

uint32_t baton_gpu_abi(void) {
  return BATON_GPU_ABI;
}

const char* baton_gpu_why(void) {
  return why.c_str();
}

BatonGpuStatus baton_gpu_open(int32_t device, BatonGpu** out) {
  return guarded([&] {
    auto gpu = std::make_unique<BatonGpu>();
    (void)driver();
    int count = 0;
    check(cudaGetDeviceCount(&count), "no GPU can be used");
    if (device < 0 || device >= count) {
      throw Failure{BATON_GPU_NO_DEVICE,
                    "there is no GPU " + std::to_string(device) + " here, but " + std::to_string(count)};
    }
    gpu->device = device;
    const OnDevice on(device);
    check_device(*gpu);
    check(cudaStreamCreateWithFlags(&gpu->now, cudaStreamNonBlocking), "no stream");
    check(cudaStreamCreateWithFlags(&gpu->after, cudaStreamNonBlocking), "no stream");
    warm_up(*gpu);
    *out = gpu.release();
  });
}

void baton_gpu_close(BatonGpu* gpu) {
  (void)guarded([&] {
    const OnDevice on(gpu->device);
    delete gpu;
  });
}

const char* baton_gpu_name(const BatonGpu* gpu) {
  return gpu->name.c_str();
}

BatonGpuStatus baton_gpu_allocate(BatonGpu* gpu, uint64_t bytes, uint64_t* address) {
  return guarded([&] {
    const OnDevice on(gpu->device);
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "no device memory");
    *address = reinterpret_cast<uint64_t>(memory);
  });
}

BatonGpuStatus baton_gpu_free(BatonGpu* gpu, uint64_t address) {
  return guarded([&] {
    const OnDevice on(gpu->device);
    check(cudaStreamSynchronize(gpu->now), "a write failed");
    check(cudaStreamSynchronize(gpu->after), "a write failed");
    if (!own_mappings().free_later(address)) check(cudaFree(as_pointer(address)), "the memory cannot be freed");
  });
}

BatonGpuStatus baton_gpu_copy(BatonGpu* gpu, uint64_t to, uint64_t from, uint64_t bytes) {
  return guarded([&] {
    const OnDevice on(gpu->device);
    check(cudaMemcpyAsync(as_pointer(to), as_pointer(from), bytes, cudaMemcpyDefault, gpu->now), "no copy");
    check(cudaStreamSynchronize(gpu->now), "the copy fails");
  });
}

BatonGpuStatus baton_gpu_fill(BatonGpu* gpu, uint64_t address, uint8_t value, uint64_t bytes) {
  return guarded([&] {
    const OnDevice on(gpu->device);
    check(cudaMemsetAsync(as_pointer(address), value, bytes, gpu->now), "no fill");
    check(cudaStreamSynchronize(gpu->now), "the fill fails");
  });
}

BatonGpuStatus baton_gpu_range(BatonGpu* gpu, uint64_t address, uint64_t* base, uint64_t* bytes) {
  return guarded([&] {
    const OnDevice on(gpu->device);
    gpu->range(address, *base, *bytes);
  });
}

BatonGpuStatus baton_gpu_share(BatonGpu* gpu, uint64_t base, BatonGpuHandle* packed) {
  return guarded([&] {
    const OnDevice on(gpu->device);
    Handle handle{.process = this_process(), .base = base};
    const cudaError_t error = cudaIpcGetMemHandle(&handle.memory, as_pointer(base));
    if (error != cudaSuccess) {
      cudaGetLastError();
      throw Failure{BATON_GPU_NOT_SHARED, std::string("the memory cannot be shared, as that of expandable segments "
                                                      "cannot: ") +
                                              cudaGetErrorString(error)};
    }
    *packed = {};
    std::memcpy(packed->bytes, &handle, sizeof handle);
  });
}

BatonGpuStatus baton_gpu_map(BatonGpu* gpu, const BatonGpuHandle* packed, uint64_t* base, uint64_t* bytes) {
  return guarded([&] {
    const OnDevice on(gpu->device);
    const Handle handle = unpack(*packed);
    if (handle.process == this_process()) {
      gpu->range(handle.base, *base, *bytes);
      open_peer(*gpu, *base);
      return own_mappings().add(*base);
    }
    void* memory = nullptr;
    const cudaError_t error = cudaIpcOpenMemHandle(&memory, handle.memory, cudaIpcMemLazyEnablePeerAccess);
    if (error != cudaSuccess) {
      cudaGetLastError();
      throw Failure{BATON_GPU_NOT_SHARED,
                    std::string("the other process's memory cannot be mapped: ") + cudaGetErrorString(error)};
    }
    try {
      gpu->range(reinterpret_cast<uint64_t>(memory), *base, *bytes);
    } catch (...) {
      cudaIpcCloseMemHandle(memory);
      throw;
    }
  });
}

BatonGpuStatus baton_gpu_unmap(BatonGpu* gpu, uint64_t base) {
  return guarded([&] {
    const OnDevice on(gpu->device);
    if (!own_mappings().remove(base)) check(cudaIpcCloseMemHandle(as_pointer(base)), "the memory cannot be unmapped");
  });
}

BatonGpuStatus baton_gpu_dma_buf(BatonGpu* gpu, uint64_t address, uint64_t bytes, int* fd, uint64_t* offset) {
  return guarded([&] {
    const OnDevice on(gpu->device);
    constexpr int kDmaBuf = 1;  // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    const uint64_t begin = address / page * page;
    const uint64_t end = (address + bytes + page - 1) / page * page;
    const auto make = driver().get_range_handle;
    if (make == nullptr || make(fd, begin, end - begin, kDmaBuf, 0) != 0) {
      throw Failure{BATON_GPU_NOT_SHARED, "the driver makes no dma-buf of this memory"};
    }
    *offset = address - begin;
  });
}

BatonGpuStatus baton_gpu_flush(BatonGpu* gpu) {
  return guarded([&] {
    const OnDevice on(gpu->device);
    if (gpu->attribute(cudaDevAttrGPUDirectRDMAWritesOrdering) >= cudaGPUDirectRDMAWritesOrderingOwner) return;
    if ((gpu->attribute(cudaDevAttrGPUDirectRDMAFlushWritesOptions) & cudaFlushGPUDirectRDMAWritesOptionHost) == 0) {
      throw Failure{BATON_GPU_NOT_SHARED, "the GPU does not tell when writes of adapters are visible to it"};
    }
    check(cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
                                             cudaFlushGPUDirectRDMAWritesToOwner),
          "writes of adapters cannot be waited for");
  });
}

BatonGpuStatus baton_gpu_write(BatonGpu* gpu, uint64_t address, uint64_t value) {
  return guarded([&] {
    const OnDevice on(gpu->device);
    gpu->write(gpu->now, address, value);
  });
}

BatonGpuStatus baton_gpu_write_after(BatonGpu* gpu, uint64_t stream, uint64_t address, uint64_t value) {
  return guarded([&] {
    const OnDevice on(gpu->device);
    wait_for_stream(gpu->after, stream);
    gpu->write(gpu->after, address, value);
  });
}

BatonGpuStatus baton_gpu_queue_open(BatonGpu* gpu, BatonGpuQueue** queue) {
  return guarded([&] {
    const OnDevice on(gpu->device);
    *queue = open_queue(*gpu).release();
  });
}

void baton_gpu_queue_close(BatonGpuQueue* queue) {
  (void)guarded([&] {
    const OnDevice on(queue->gpu->device);
    close_queue(std::unique_ptr<BatonGpuQueue>(queue));
  });
}

uint64_t baton_gpu_queue_scratch(const BatonGpuQueue* queue) {
  return reinterpret_cast<uint64_t>(queue->slots[0].device->scratch);
}

int baton_gpu_queue_fd(const BatonGpuQueue* queue) {
  return queue->fd;
}

BatonGpuStatus baton_gpu_launch(BatonGpuQueue* queue, const BatonGpuPiece* pieces, uint32_t piece_count,
                                const BatonGpuGate* gates, uint32_t gate_count, int sum, uint64_t wait_ns) {
  return guarded([&] {
    const OnDevice on(queue->gpu->device);
    launch(*queue, pieces, piece_count, gates, gate_count, sum != 0, wait_ns);
  });
}

BatonGpuStatus baton_gpu_ended(BatonGpuQueue* queue, BatonGpuResult* results, uint32_t* gate_count,
                               uint64_t* device_ns) {
  *gate_count = 0;
  return guarded([&] {
    if (queue->taken == queue->launched) return;
    const OnDevice on(queue->gpu->device);
    if (queue->ended.load(std::memory_order_acquire) == queue->taken) {
      // After an error no one is notified any more.
      const cudaError_t error = cudaStreamQuery(queue->stream);
      if (error != cudaErrorNotReady) check(error, "the launch failed");
      return;
    }
    const Slot& slot = queue->slots[queue->taken++ % BATON_GPU_LAUNCHES_MAX];
    float ms = 0;
    check(cudaEventElapsedTime(&ms, slot.begun, slot.ended), "the launch failed");
    *device_ns = static_cast<uint64_t>(ms * 1e6);
    *gate_count = slot.gates;
    for (std::uint32_t i = 0; i < slot.gates; ++i) {
      results[i] = {slot.host->states[i].outcome, fold(slot.host->states[i].sum)};
    }
  });
}

// ---------------------------------------------------------------- copies between the host and the device

BatonGpuStatus baton_gpu_copies_open(BatonGpu* gpu, BatonGpuCopied copied, void* context, BatonGpuCopies** copies) {
  return guarded([&] {
    const OnDevice on(gpu->device);
    *copies = open_copies(*gpu, copied, context).release();
  });
}

void baton_gpu_copies_close(BatonGpuCopies* copies) {
  (void)guarded([&] {
    const OnDevice on(copies->gpu->device);
    delete copies;
  });
}

BatonGpuStatus baton_gpu_copies_pin(BatonGpuCopies* copies, uint64_t address, uint64_t bytes) {
  return guarded([&] {
    const OnDevice on(copies->gpu->device);
    check(cudaHostRegister(as_pointer(address), bytes, cudaHostRegisterPortable), "the memory cannot be pinned");
  });
}

BatonGpuStatus baton_gpu_copies_unpin(BatonGpuCopies* copies, uint64_t address) {
  return guarded([&] {
    const OnDevice on(copies->gpu->device);
    check(cudaHostUnregister(as_pointer(address)), "the memory cannot be released");
  });
}

BatonGpuStatus baton_gpu_copies_start(BatonGpuCopies* copies, uint64_t ticket, BatonGpuDirection direction,
                                      const BatonGpuCopy* batch, uint32_t count, int ordered, uint64_t after) {
  return guarded([&] {
    const OnDevice on(copies->gpu->device);
    start_copies(*copies, ticket, direction, batch, count, ordered != 0, after);
  });
}

BatonGpuStatus baton_gpu_copies_check(BatonGpuCopies* copies) {
  return guarded([&] {
    const OnDevice on(copies->gpu->device);
    for (const auto& lane : copies->lanes) {
      const cudaError_t error = cudaStreamQuery(lane.stream);
      if (error != cudaErrorNotReady) check(error, "copies failed");
    }
  });
}

}  // extern "C"
