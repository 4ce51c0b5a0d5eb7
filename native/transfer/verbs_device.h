// The RDMA adapters of this host: the library, the ports that are used, and the pool, registered with each once. The
// pool may lie in a GPU's memory (GPUDirect RDMA).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transfer/library.h"
#include "transfer/pool.h"
#include "transfer/types.h"
#include "transfer/verbs_abi.h"

namespace baton::gpu {
class Device;
}

namespace baton::transfer {

class CudaPool;

// Memory that the adapter may read and write for us and, if `readable`, peers may read. No peer may ever write.
class VerbsMemory {
 public:
  // Throws std::system_error.
  VerbsMemory(const ibv::Calls& calls, ibv::Pd* pd, const void* begin, std::uint64_t bytes, bool readable);
  // Memory of a GPU: by a dma-buf or, where the driver makes none, by the kernel's module nvidia-peermem. Throws
  // std::runtime_error.
  VerbsMemory(const ibv::Calls& calls, ibv::Pd* pd, gpu::Device& gpu, std::uint64_t begin, std::uint64_t bytes,
              bool readable);
  VerbsMemory(VerbsMemory&& other) noexcept : calls_(other.calls_), mr_(std::exchange(other.mr_, nullptr)) {}
  VerbsMemory& operator=(VerbsMemory&&) = delete;
  ~VerbsMemory();

  [[nodiscard]] std::uint32_t lkey() const { return mr_->lkey; }
  [[nodiscard]] std::uint32_t rkey() const { return mr_->rkey; }

 private:
  const ibv::Calls& calls_;
  ibv::Mr* mr_;
};

// An entry of `FabricOptions::verbs_devices`; -1: any that suits.
struct VerbsChoice {
  std::string device;
  int port = -1;
  int gid_index = -1;
};
// Throws std::invalid_argument.
[[nodiscard]] std::vector<VerbsChoice> parse_verbs_devices(const std::string& text);

// One port of an open device.
class VerbsDevice {
 public:
  // Throws std::runtime_error where the port is not active or the device refuses something. `cuda`: the pool, if it
  // lies in a GPU's memory.
  VerbsDevice(const ibv::Calls& calls, ibv::Device* device, std::uint8_t port, int gid_index, const Pool& pool,
              CudaPool* cuda);
  ~VerbsDevice();
  VerbsDevice(const VerbsDevice&) = delete;
  VerbsDevice& operator=(const VerbsDevice&) = delete;

  // The port as it is now; throws std::runtime_error unless it is active.
  [[nodiscard]] ibv::PortAttr query() const;
  [[nodiscard]] ibv::Gid gid() const;

  const ibv::Calls& calls;
  const std::string name;  // "mlx5_0:1"
  const std::uint8_t port;
  int gid_index = 0;
  ibv::Context* context = nullptr;
  ibv::Pd* pd = nullptr;
  ibv::DeviceAttr limits{};
  std::vector<VerbsMemory> layers;  // Registered layers of the pool.
  // Of a pool in a GPU's memory: what peers read to prove their access, and where this side's proofs arrive.
  std::optional<VerbsMemory> proof, landing;

 private:
  void close();
  void register_pool(const Pool& pool, CudaPool* cuda);
  [[nodiscard]] int choose_gid(const ibv::PortAttr& attr) const;
};

// One agent's adapters.
class VerbsDevices {
 public:
  // Does not throw if no adapter is usable: the calls that return a device do.
  VerbsDevices(const FabricOptions& options, const Pool& pool, CudaPool* cuda = nullptr);

  // Whether this host has adapters, working or not.
  [[nodiscard]] bool present() const { return present_; }
  // Returns the ports in turn, one per connection. Throws std::runtime_error if there is none.
  [[nodiscard]] VerbsDevice& next();
  // Returns the port for the peer's `rail`: fabrics with several rails connect equal ones.
  [[nodiscard]] VerbsDevice& of_rail(std::uint32_t rail);
  [[nodiscard]] std::uint32_t rail_of(const VerbsDevice& device) const;

 private:
  void load(const FabricOptions& options);
  void open(const std::vector<VerbsChoice>& choices, const Pool& pool, CudaPool* cuda);

  ibv::Calls calls_{};
  std::vector<std::unique_ptr<VerbsDevice>> devices_;
  std::string why_;
  bool present_ = false;
  std::uint32_t next_ = 0;
};

}  // namespace baton::transfer
