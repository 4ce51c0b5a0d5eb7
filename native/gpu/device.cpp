#include "gpu/device.h"

#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <utility>

#include "transfer/library.h"

namespace baton::gpu {
namespace {

constexpr const char* kDriver = "libcuda.so.1";
constexpr const char* kName = "libbaton_gpu.so";

// The library lies beside the file that this code is in: the build puts both into one package.
std::string find_own_library() {
  if (!transfer::Library(kDriver).why().empty()) {
    throw Unavailable(std::string("there is no NVIDIA driver here (") + kDriver + ")");
  }
  Dl_info own{};
  const bool found = ::dladdr(reinterpret_cast<void*>(&find_own_library), &own) != 0;
  const std::string path = found ? own.dli_fname : "";
  std::string library = path.substr(0, path.rfind('/') + 1) + kName;
  if (::access(library.c_str(), R_OK) != 0) {
    throw Unavailable("this build has no CUDA part: there was no nvcc when it was made");
  }
  return library;
}

void load(const std::string& name, Calls& calls) {
  transfer::Library library(name);
  const auto find = [&](const char* call_name, auto*& call) {
    return library.find(std::string("baton_gpu_") + call_name, call);
  };
  const bool whole = find("abi", calls.abi) && find("why", calls.why) && find("open", calls.open) &&
                     find("close", calls.close) && find("name", calls.name) && find("allocate", calls.allocate) &&
                     find("free", calls.free) && find("copy", calls.copy) && find("fill", calls.fill) &&
                     find("range", calls.range) && find("share", calls.share) && find("map", calls.map) &&
                     find("unmap", calls.unmap) && find("dma_buf", calls.dma_buf) && find("flush", calls.flush) &&
                     find("write", calls.write) && find("write_after", calls.write_after) &&
                     find("queue_open", calls.queue_open) && find("queue_close", calls.queue_close) &&
                     find("queue_scratch", calls.queue_scratch) && find("queue_fd", calls.queue_fd) &&
                     find("launch", calls.launch) && find("ended", calls.ended) &&
                     find("copies_open", calls.copies_open) && find("copies_close", calls.copies_close) &&
                     find("copies_pin", calls.copies_pin) && find("copies_unpin", calls.copies_unpin) &&
                     find("copies_start", calls.copies_start) && find("copies_check", calls.copies_check);
  if (!whole) throw Unavailable(library.why());
  if (calls.abi() != BATON_GPU_ABI) throw Unavailable(name + " is of another version of Baton");
}

}  // namespace

// ---------------------------------------------------------------- a device

Device::Device(const std::string& library, int number) {
  load(library.empty() ? find_own_library() : library, calls_);
  check(calls_.open(number, &gpu_));
}

Device::~Device() {
  calls_.close(gpu_);
}

void Device::check(BatonGpuStatus status) const {
  if (status == BATON_GPU_OK) return;
  if (status == BATON_GPU_NO_DRIVER || status == BATON_GPU_NO_DEVICE) throw Unavailable(calls_.why());
  throw Error(calls_.why());
}

void Device::copy(std::uint64_t to, std::uint64_t from, std::uint64_t bytes) {
  check(calls_.copy(gpu_, to, from, bytes));
}

void Device::fill(std::uint64_t address, std::uint8_t value, std::uint64_t bytes) {
  check(calls_.fill(gpu_, address, value, bytes));
}

void Device::write(std::uint64_t address, std::uint64_t value) {
  check(calls_.write(gpu_, address, value));
}

void Device::write_after(std::uint64_t stream, std::uint64_t address, std::uint64_t value) {
  check(calls_.write_after(gpu_, stream, address, value));
}

Device::Range Device::range(std::uint64_t address) {
  Range found;
  check(calls_.range(gpu_, address, &found.base, &found.bytes));
  return found;
}

BatonGpuHandle Device::share(std::uint64_t base) {
  BatonGpuHandle handle{};
  check(calls_.share(gpu_, base, &handle));
  return handle;
}

DmaBuf Device::dma_buf(std::uint64_t address, std::uint64_t bytes) {
  int fd = -1;
  std::uint64_t offset = 0;
  check(calls_.dma_buf(gpu_, address, bytes, &fd, &offset));
  return {fd, offset};
}

void Device::flush() {
  check(calls_.flush(gpu_));
}

// ---------------------------------------------------------------- memory

DmaBuf::~DmaBuf() {
  ::close(fd_);
}

Memory::Memory(std::shared_ptr<Device> device, std::uint64_t bytes) : device_(std::move(device)), bytes_(bytes) {
  device_->check(device_->calls_.allocate(device_->gpu_, bytes, &address_));
}

Memory::~Memory() {
  device_->calls_.free(device_->gpu_, address_);
}

Mapping::Mapping(Device& device, const BatonGpuHandle& handle) : device_(&device) {
  device.check(device.calls_.map(device.gpu_, &handle, &range_.base, &range_.bytes));
}

Mapping::Mapping(Mapping&& other) noexcept : device_(std::exchange(other.device_, nullptr)), range_(other.range_) {}

Mapping::~Mapping() {
  if (device_ != nullptr) device_->calls_.unmap(device_->gpu_, range_.base);
}

// ---------------------------------------------------------------- launches

namespace {

// Wait on the device for a chunk whose release is announced, then retry, together with chunks that came meanwhile.
constexpr std::uint64_t kWaitNs = 2'000'000;

}  // namespace

Queue::Queue(Device& device) : device_(device) {
  device.check(device.calls_.queue_open(device.gpu_, &queue_));
}

Queue::~Queue() {
  device_.calls_.queue_close(queue_);
}

bool Queue::has_room(std::size_t pieces) const {
  return pieces_.size() + pieces <= BATON_GPU_PIECES_MAX && gates_.size() < BATON_GPU_GATES_MAX;
}

void Queue::add(const BatonGpuGate& gate, std::span<const BatonGpuPiece> pieces, void* tag) {
  const auto number = static_cast<std::uint32_t>(gates_.size());
  for (BatonGpuPiece piece : pieces) {
    piece.gate = number;
    pieces_.push_back(piece);
  }
  gates_.push_back(gate);
  tags_.push_back(tag);
}

void Queue::launch(bool sums) {
  if (tags_.empty() || under_way_.size() == BATON_GPU_LAUNCHES_MAX) return;
  device_.check(device_.calls_.launch(queue_, pieces_.data(), static_cast<std::uint32_t>(pieces_.size()), gates_.data(),
                                      static_cast<std::uint32_t>(gates_.size()), sums ? 1 : 0, kWaitNs));
  ++launches_;
  under_way_.push_back(std::exchange(tags_, {}));
  pieces_.clear();
  gates_.clear();
}

void Queue::take(std::vector<Ended>& ended) {
  // First the notice is taken, then the queue is looked at, so that nothing ends unnoticed in between.
  std::uint64_t count = 0;
  [[maybe_unused]] const auto taken = ::read(fd(), &count, sizeof count);
  std::array<BatonGpuResult, BATON_GPU_GATES_MAX> results;
  while (!under_way_.empty()) {
    std::uint32_t gates = 0;
    std::uint64_t ns = 0;
    device_.check(device_.calls_.ended(queue_, results.data(), &gates, &ns));
    if (gates == 0) return;
    device_ns_ += ns;
    for (std::size_t i = 0; i < gates; ++i) ended.push_back({under_way_.front()[i], results[i]});
    under_way_.pop_front();
  }
}

}  // namespace baton::gpu
