// A libnvidia-ml.so.1 for hosts without a GPU. It answers what the file $FAKE_NVML says, a line for each thing:
//
//    driver VERSION CUDA             such as: driver 580.95.05 13000
//    gpu BUS-ID TOTAL FREE MAJOR MINOR UUID NAME…
//    way FROM TO CAPABILITY          a capability between two GPUs, as NVML numbers it; those not named are missing
//
// Without the file the library does not initialise, as without a driver's kernel module.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

namespace {

constexpr int kOk = 0, kUninitialized = 1, kNotSupported = 3, kDriverNotLoaded = 9;

struct Gpu {
  std::string bus_id, uuid, name;
  unsigned long long total = 0, free = 0;
  int major = 0, minor = 0;
};

struct Machine {
  std::string version;
  int cuda = 0;
  std::vector<Gpu> gpus;
  std::set<std::tuple<std::size_t, std::size_t, int>> ways;
};

Machine* machine = nullptr;

int copy(const std::string& text, char* to, unsigned size) {
  std::snprintf(to, size, "%s", text.c_str());
  return kOk;
}

std::size_t index_of(const void* gpu) {
  return static_cast<std::size_t>(static_cast<const Gpu*>(gpu) - machine->gpus.data());
}

}  // namespace

extern "C" {

struct Memory {
  unsigned long long total, free, used;
};
struct Pci {
  char bus_id_legacy[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char bus_id[32];
};

int nvmlInit_v2() {
  const char* path = std::getenv("FAKE_NVML");
  std::ifstream file(path == nullptr ? "" : path);
  if (!file) return kDriverNotLoaded;
  auto* found = new Machine;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string kind;
    words >> kind;
    if (kind == "driver") words >> found->version >> found->cuda;
    if (kind == "gpu") {
      Gpu gpu;
      words >> gpu.bus_id >> gpu.total >> gpu.free >> gpu.major >> gpu.minor >> gpu.uuid;
      std::getline(words >> std::ws, gpu.name);
      found->gpus.push_back(gpu);
    }
    if (kind == "way") {
      std::size_t from = 0, to = 0;
      int capability = 0;
      words >> from >> to >> capability;
      found->ways.insert({from, to, capability});
    }
  }
  delete machine;
  machine = found;
  return kOk;
}

int nvmlShutdown() {
  if (machine == nullptr) return kUninitialized;
  delete machine;
  machine = nullptr;
  return kOk;
}

const char* nvmlErrorString(int status) {
  return status == kDriverNotLoaded ? "Driver Not Loaded" : "Not Supported";
}

int nvmlSystemGetDriverVersion(char* to, unsigned size) {
  return copy(machine->version, to, size);
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = machine->cuda;
  return kOk;
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(machine->gpus.size());
  return kOk;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** gpu) {
  *gpu = &machine->gpus.at(index);
  return kOk;
}
int nvmlDeviceGetName(void* gpu, char* to, unsigned size) {
  return copy(static_cast<Gpu*>(gpu)->name, to, size);
}
int nvmlDeviceGetUUID(void* gpu, char* to, unsigned size) {
  return copy(static_cast<Gpu*>(gpu)->uuid, to, size);
}
int nvmlDeviceGetMemoryInfo(void* gpu, Memory* memory) {
  const auto& own = *static_cast<Gpu*>(gpu);
  *memory = {own.total, own.free, own.total - own.free};
  return own.total == 0 ? kNotSupported : kOk;
}
int nvmlDeviceGetPciInfo_v3(void* gpu, Pci* pci) {
  *pci = {};
  return copy(static_cast<Gpu*>(gpu)->bus_id, pci->bus_id, sizeof pci->bus_id);
}
int nvmlDeviceGetCudaComputeCapability(void* gpu, int* major, int* minor) {
  *major = static_cast<Gpu*>(gpu)->major;
  *minor = static_cast<Gpu*>(gpu)->minor;
  return kOk;
}
int nvmlDeviceGetP2PStatus(void* one, void* other, int capability, int* status) {
  *status = machine->ways.contains({index_of(one), index_of(other), capability}) ? 0 : 5;
  return kOk;
}

}  // extern "C"
