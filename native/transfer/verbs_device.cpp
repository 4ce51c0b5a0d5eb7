#include "transfer/verbs_device.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "transfer/cuda_pool.h"

namespace baton::transfer {
namespace {

template <class Result>
Result* made(Result* result, const char* what) {
  if (result == nullptr) throw std::system_error(errno, std::generic_category(), what);
  return result;
}

int access_of(bool readable) {
  return ibv::kLocalWrite | (readable ? ibv::kRemoteRead : 0);
}

ibv::Mr* register_on_gpu(const ibv::Calls& calls, ibv::Pd* pd, gpu::Device& gpu, std::uint64_t begin,
                         std::uint64_t bytes, int access) {
  std::string why = "libibverbs takes no dma-buf";
  if (calls.reg_dmabuf_mr != nullptr) {
    try {
      const gpu::DmaBuf buffer = gpu.dma_buf(begin, bytes);
      ibv::Mr* const mr = calls.reg_dmabuf_mr(pd, buffer.offset(), bytes, begin, buffer.fd(), access);
      if (mr != nullptr) return mr;
      why = std::string("the adapter takes no dma-buf: ") + std::strerror(errno);
    } catch (const gpu::Error& error) {
      why = error.what();
    }
  }
  ibv::Mr* const mr = calls.reg_mr(pd, reinterpret_cast<void*>(begin), bytes, access);
  if (mr != nullptr) return mr;
  throw std::runtime_error("memory of the GPU cannot be registered with the adapter: " + why +
                           "; nor is it without one (nvidia-peermem, ulimit -l): " + std::strerror(errno));
}

// Rank of a GID for connections beyond the adapter's own network, to which RoCE v2 can be routed.
int suitability(const ibv::GidEntry& entry) {
  const std::uint8_t* raw = entry.gid.raw;
  static constexpr std::uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};
  const bool ipv4 = std::memcmp(raw, kMapped, sizeof kMapped) == 0;
  const bool link_local = raw[0] == 0xFE && raw[1] == 0x80;
  return (entry.gid_type == ibv::kGidRoceV2 ? 4 : 0) + (ipv4 ? 2 : link_local ? 0 : 1);
}

}  // namespace

std::vector<VerbsChoice> parse_verbs_devices(const std::string& text) {
  std::vector<VerbsChoice> choices;
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string one = text.substr(begin, end - begin);
    VerbsChoice choice{.device = one.substr(0, one.find(':'))};
    const char* at = one.data() + choice.device.size();
    const char* const last = one.data() + one.size();
    const auto number = [&](int& value) {
      if (at == last) return;
      const auto parsed = std::from_chars(at + 1, last, value);
      if (parsed.ec != std::errc{} || value < 0 || value > 255) at = nullptr;
      if (at != nullptr) at = parsed.ptr;
    };
    number(choice.port);
    if (at != nullptr) number(choice.gid_index);
    if (at != last || choice.device.empty() || choice.port == 0) {
      throw std::invalid_argument("'" + one + "' does not name an RDMA device as name, name:port or name:port:gid");
    }
    choices.push_back(std::move(choice));
    begin = end + 1;
  }
  return choices;
}

// ---------------------------------------------------------------- memory

VerbsMemory::VerbsMemory(const ibv::Calls& calls, ibv::Pd* pd, const void* begin, std::uint64_t bytes, bool readable)
    : calls_(calls),
      mr_(made(calls.reg_mr(pd, const_cast<void*>(begin), bytes, access_of(readable)),
               "memory cannot be registered with the adapter (ulimit -l?)")) {}

VerbsMemory::VerbsMemory(const ibv::Calls& calls, ibv::Pd* pd, gpu::Device& gpu, std::uint64_t begin,
                         std::uint64_t bytes, bool readable)
    : calls_(calls), mr_(register_on_gpu(calls, pd, gpu, begin, bytes, access_of(readable))) {}

VerbsMemory::~VerbsMemory() {
  if (mr_ != nullptr) calls_.dereg_mr(mr_);
}

// ---------------------------------------------------------------- a device

VerbsDevice::VerbsDevice(const ibv::Calls& all, ibv::Device* device, std::uint8_t number, int gid, const Pool& pool,
                         CudaPool* cuda)
    : calls(all), name(std::string(device->name) + ":" + std::to_string(number)), port(number), gid_index(gid) {
  try {
    context = made(calls.open_device(device), "the device cannot be opened");
    const ibv::PortAttr attr = query();
    if (gid_index < 0) gid_index = choose_gid(attr);
    if (calls.query_device(context, &limits) != 0) throw std::runtime_error("the device does not say its limits");
    pd = made(calls.alloc_pd(context), "the device has no protection domain left");
    register_pool(pool, cuda);
  } catch (...) {
    close();
    throw;
  }
}

VerbsDevice::~VerbsDevice() {
  close();
}

void VerbsDevice::register_pool(const Pool& pool, CudaPool* cuda) {
  for (const std::uint8_t* layer : pool.layers) {
    if (cuda == nullptr) {
      layers.emplace_back(calls, pd, layer, pool.layer_bytes(), true);
    } else {
      layers.emplace_back(calls, pd, *cuda->device(), reinterpret_cast<std::uint64_t>(layer), pool.layer_bytes(), true);
    }
  }
  if (cuda == nullptr) return;
  proof.emplace(calls, pd, *cuda->device(), cuda->proof_address(), CudaPool::kProofBytes, true);
  landing.emplace(calls, pd, *cuda->device(), cuda->landing_address(), CudaPool::kLandings * CudaPool::kProofBytes,
                  false);
}

void VerbsDevice::close() {
  layers.clear();
  proof.reset();
  landing.reset();
  if (pd != nullptr) calls.dealloc_pd(pd);
  if (context != nullptr) calls.close_device(context);
}

ibv::PortAttr VerbsDevice::query() const {
  ibv::PortAttr attr{};
  if (calls.query_port(context, port, &attr) != 0) throw std::runtime_error("it has no such port");
  if (attr.state != ibv::kPortActive) throw std::runtime_error("the port is down");
  return attr;
}

ibv::Gid VerbsDevice::gid() const {
  ibv::Gid gid{};
  if (calls.query_gid(context, port, gid_index, &gid) != 0) throw std::runtime_error("it has no such GID");
  return gid;
}

// Infiniband has one that matters, the first; an Ethernet port has one for each address and version of RoCE.
int VerbsDevice::choose_gid(const ibv::PortAttr& attr) const {
  int chosen = 0, best = -1;
  if (attr.link_layer != ibv::kLinkEthernet || calls.query_gid_ex == nullptr) return chosen;
  for (int index = 0; index < attr.gid_tbl_len; ++index) {
    ibv::GidEntry entry{};
    const auto at = static_cast<std::uint32_t>(index);
    if (calls.query_gid_ex(context, port, at, &entry, 0, sizeof entry) != 0) continue;  // Empty.
    if (suitability(entry) <= best) continue;
    best = suitability(entry);
    chosen = index;
  }
  return chosen;
}

// ---------------------------------------------------------------- all of them

VerbsDevices::VerbsDevices(const FabricOptions& options, const Pool& pool, CudaPool* cuda) {
  load(options);
  if (why_.empty()) open(parse_verbs_devices(options.verbs_devices), pool, cuda);
}

void VerbsDevices::load(const FabricOptions& options) {
  Library library(options.verbs_library);
  const auto find = [&](const char* name, auto*& call) { return library.find(std::string("ibv_") + name, call); };
  const bool whole = find("get_device_list", calls_.get_device_list) &&
                     find("free_device_list", calls_.free_device_list) && find("open_device", calls_.open_device) &&
                     find("close_device", calls_.close_device) && find("query_device", calls_.query_device) &&
                     find("query_port", calls_.query_port) && find("query_gid", calls_.query_gid) &&
                     find("alloc_pd", calls_.alloc_pd) && find("dealloc_pd", calls_.dealloc_pd) &&
                     find("reg_mr", calls_.reg_mr) && find("dereg_mr", calls_.dereg_mr) &&
                     find("create_comp_channel", calls_.create_comp_channel) &&
                     find("destroy_comp_channel", calls_.destroy_comp_channel) && find("create_cq", calls_.create_cq) &&
                     find("destroy_cq", calls_.destroy_cq) && find("get_cq_event", calls_.get_cq_event) &&
                     find("ack_cq_events", calls_.ack_cq_events) && find("create_qp", calls_.create_qp) &&
                     find("modify_qp", calls_.modify_qp) && find("destroy_qp", calls_.destroy_qp) &&
                     find("wc_status_str", calls_.wc_status_str) && find("fork_init", calls_.fork_init);
  if (!whole) {
    why_ = library.why();
    return;
  }
  calls_.query_gid_ex = reinterpret_cast<decltype(calls_.query_gid_ex)>(library.find("_ibv_query_gid_ex"));
  calls_.reg_dmabuf_mr = reinterpret_cast<decltype(calls_.reg_dmabuf_mr)>(library.find("ibv_reg_dmabuf_mr"));
  // Where the kernel does not see to it, a forked child must not get the registered pages: the adapter keeps to those,
  // and the parent would go on with copies.
  calls_.fork_init();
}

void VerbsDevices::open(const std::vector<VerbsChoice>& choices, const Pool& pool, CudaPool* cuda) {
  int count = 0;
  ibv::Device** list = calls_.get_device_list(&count);
  present_ = count > 0 || !choices.empty();
  const auto try_port = [&](ibv::Device* device, int port, int gid_index) {
    try {
      devices_.push_back(
          std::make_unique<VerbsDevice>(calls_, device, static_cast<std::uint8_t>(port), gid_index, pool, cuda));
    } catch (const std::runtime_error& error) {
      why_ += (why_.empty() ? "" : ", ") + std::string(device->name) + ":" + std::to_string(port) + ": " + error.what();
    }
  };
  for (int i = 0; list != nullptr && i < count && choices.empty(); ++i) try_port(list[i], 1, -1);
  for (const VerbsChoice& choice : choices) {
    const auto found = std::find_if(list, list + count, [&](const ibv::Device* d) { return choice.device == d->name; });
    if (found != list + count) {
      try_port(*found, choice.port < 0 ? 1 : choice.port, choice.gid_index);
    } else {
      why_ += (why_.empty() ? "" : ", ") + ("there is no device " + choice.device);
    }
  }
  if (list != nullptr) calls_.free_device_list(list);
  if (why_.empty() && devices_.empty()) why_ = "this host has no RDMA device";
}

VerbsDevice& VerbsDevices::next() {
  if (devices_.empty()) throw std::runtime_error(why_);
  return of_rail(next_++);
}

VerbsDevice& VerbsDevices::of_rail(std::uint32_t rail) {
  if (devices_.empty()) throw std::runtime_error(why_);
  // A port that went down since is passed over, while another is up.
  for (std::size_t step = 0; step + 1 < devices_.size(); ++step) {
    VerbsDevice& device = *devices_[(rail + step) % devices_.size()];
    ibv::PortAttr attr{};
    if (calls_.query_port(device.context, device.port, &attr) == 0 && attr.state == ibv::kPortActive) return device;
  }
  return *devices_[(rail + devices_.size() - 1) % devices_.size()];
}

std::uint32_t VerbsDevices::rail_of(const VerbsDevice& device) const {
  const auto is = [&](const auto& other) { return other.get() == &device; };
  return static_cast<std::uint32_t>(std::find_if(devices_.begin(), devices_.end(), is) - devices_.begin());
}

}  // namespace baton::transfer
