// The RDMA adapters of this host: the library, the ports that are used, and the pool, registered with each once.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transfer/library.h"
#include "transfer/pool.h"
#include "transfer/types.h"
#include "transfer/verbs_abi.h"

namespace baton::transfer {

// Memory that the adapter may read and write for us and, if `readable`, peers may read. No peer may ever write.
class VerbsMemory {
 public:
  // Throws std::system_error.
  VerbsMemory(const ibv::Calls& calls, ibv::Pd* pd, const void* begin, std::uint64_t bytes, bool readable);
  VerbsMemory(VerbsMemory&& other) noexcept : calls_(other.calls_), mr_(std::exchange(other.mr_, nullptr)) {}
  VerbsMemory& operator=(VerbsMemory&&) = delete;
  ~VerbsMemory();

  [[nodiscard]] std::uint32_t lkey() const { return mr_->lkey; }
  [[nodiscard]] std::uint32_t rkey() const { return mr_->rkey; }

 private:
  const ibv::Calls& calls_;
  ibv::Mr* mr_;
};

// What `FabricOptions::verbs_devices` names; -1: whatever suits.
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
  // Throws std::runtime_error where the port is not active or the device refuses something.
  VerbsDevice(const ibv::Calls& calls, ibv::Device* device, std::uint8_t port, int gid_index, const Pool& pool);
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
  std::vector<VerbsMemory> layers;  // Of the pool.

 private:
  void close();
  [[nodiscard]] int choose_gid(const ibv::PortAttr& attr) const;
};

// Of one agent.
class VerbsDevices {
 public:
  // What is not to be had is said when a device is asked for.
  VerbsDevices(const FabricOptions& options, const Pool& pool);

  // Whether this host has adapters at all, in order or not.
  [[nodiscard]] bool present() const { return present_; }
  // In turn, for one connection after the other. Throws std::runtime_error where there is none.
  [[nodiscard]] VerbsDevice& next();
  // The one that belongs with the peer's `rail`, so that equal rails meet, as fabrics with several are built.
  [[nodiscard]] VerbsDevice& of_rail(std::uint32_t rail);
  [[nodiscard]] std::uint32_t rail_of(const VerbsDevice& device) const;

 private:
  void load(const FabricOptions& options);
  void open(const std::vector<VerbsChoice>& choices, const Pool& pool);

  ibv::Calls calls_{};
  std::vector<std::unique_ptr<VerbsDevice>> devices_;
  std::string why_;
  bool present_ = false;
  std::uint32_t next_ = 0;
};

}  // namespace baton::transfer
