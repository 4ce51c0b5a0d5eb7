#include "transfer/ucx_endpoint.h"

#include <chrono>
#include <stdexcept>

namespace baton::transfer {
namespace {

constexpr std::chrono::milliseconds kDrain(100);

}  // namespace

// ---------------------------------------------------------------- library, context, memory

UcxContext::UcxContext(const FabricOptions& options, const Pool& pool) {
  try {
    open(options, pool);
  } catch (const std::runtime_error& error) {
    why_ = error.what();
  }
}

void UcxContext::check_usable() const {
  if (!why_.empty()) throw std::runtime_error(why_);
}

void UcxContext::open(const FabricOptions& options, const Pool& pool) {
  load(options.ucx_library);
  unsigned major = 0, release = 0;
  calls.get_version(&major, &minor, &release);
  if (major != ucx::kApiMajor || minor < ucx::kApiMinor) {
    throw std::runtime_error("UCX " + std::to_string(major) + "." + std::to_string(minor) + " is none of 1." +
                             std::to_string(ucx::kApiMinor) + " or later");
  }
  const ucx::Params params{.field_mask = ucx::kSetFeatures, .features = ucx::kRemoteMemory | ucx::kWakeup};
  ucx::Config* settings = nullptr;
  check(calls.config_read(nullptr, nullptr, &settings), "UCX's variables make no sense");
  const std::unique_ptr<ucx::Config, decltype(calls.config_release)> owner(settings, calls.config_release);
  // Rendezvous is of messages, which are not sent here. While it is on, UCX reads through the kernel only from peers
  // that it does not watch, and over TCP from all others of this host.
  check(calls.config_modify(settings, "RNDV_THRESH", "inf"), "UCX keeps to rendezvous");
  check(calls.init_version(ucx::kApiMajor, ucx::kApiMinor, &params, settings, &context), "UCX cannot be set up");
  layers_.reserve(pool.layers.size());
  for (const std::uint8_t* layer : pool.layers) layers_.emplace_back(*this, layer, pool.layer_bytes());
}

void UcxContext::load(const std::string& name) {
  Library library(name);
  const auto find = [&](const char* call_name, auto*& call) {
    return library.find(std::string("ucp_") + call_name, call);
  };
  const bool whole =
      find("get_version", calls.get_version) && find("config_read", calls.config_read) &&
      find("config_modify", calls.config_modify) && find("config_release", calls.config_release) &&
      find("init_version", calls.init_version) && find("cleanup", calls.cleanup) && find("mem_map", calls.mem_map) &&
      find("mem_unmap", calls.mem_unmap) && find("rkey_pack", calls.rkey_pack) &&
      find("rkey_buffer_release", calls.rkey_buffer_release) && find("worker_create", calls.worker_create) &&
      find("worker_destroy", calls.worker_destroy) && find("worker_get_address", calls.worker_get_address) &&
      find("worker_release_address", calls.worker_release_address) && find("worker_progress", calls.worker_progress) &&
      find("worker_get_efd", calls.worker_get_efd) && find("worker_arm", calls.worker_arm) &&
      find("ep_create", calls.ep_create) && find("ep_close_nbx", calls.ep_close_nbx) &&
      find("ep_query", calls.ep_query) && find("ep_rkey_unpack", calls.ep_rkey_unpack) &&
      find("rkey_destroy", calls.rkey_destroy) && find("get_nbx", calls.get_nbx) &&
      find("request_check_status", calls.request_check_status) && find("request_free", calls.request_free) &&
      library.find("ucs_status_string", calls.status_string);  // A call of libucs, which comes with it.
  if (!whole) throw std::runtime_error(library.why());
}

UcxContext::~UcxContext() {
  layers_.clear();
  if (context != nullptr) calls.cleanup(context);
}

void UcxContext::check(ucx::Status status, const char* what) const {
  if (status != ucx::kOk) throw std::runtime_error(std::string(what) + ": " + text(status));
}

UcxMemory::UcxMemory(const UcxContext& context, const void* begin, std::uint64_t bytes) : context_(context) {
  const ucx::MemoryParams params{
      .field_mask = ucx::kSetAddress | ucx::kSetLength, .address = const_cast<void*>(begin), .length = bytes};
  context.check(context.calls.mem_map(context.context, &params, &memory_), "memory cannot be registered");
}

UcxMemory::~UcxMemory() {
  if (memory_ != nullptr) context_.calls.mem_unmap(context_.context, memory_);
}

Blob UcxMemory::key() const {
  void* buffer = nullptr;
  std::size_t bytes = 0;
  context_.check(context_.calls.rkey_pack(context_.context, memory_, &buffer, &bytes), "memory cannot be offered");
  const auto* begin = static_cast<const std::uint8_t*>(buffer);
  Blob key(begin, begin + bytes);
  context_.calls.rkey_buffer_release(buffer);
  return key;
}

// ---------------------------------------------------------------- a connection's worker

UcxWorker::UcxWorker(UcxContext& context) : context_(context) {
  const ucx::WorkerParams params{};  // One thread.
  context.check(context.calls.worker_create(context.context, &params, &worker_), "UCX gives no worker");
  const ucx::Status status = context.calls.worker_get_efd(worker_, &fd_);
  if (status == ucx::kOk) return;
  close();
  context.check(status, "what UCX uses here cannot wake a sleeper");
}

UcxWorker::~UcxWorker() {
  close();
}

// Ends what is under way, and does not return before that is so.
void UcxWorker::close() {
  if (endpoint_ != nullptr) {
    const ucx::RequestParam param{.op_attr_mask = ucx::kSetFlags, .flags = watches_peer_ ? ucx::kCloseForce : 0U};
    void* closing = context_.calls.ep_close_nbx(endpoint_, &param);
    // A forced close takes microseconds. If it takes longer, the worker's destruction ends it.
    const auto until = std::chrono::steady_clock::now() + kDrain;
    const auto goes_on = [&] {
      const bool closes = ucx::status_of(closing) == ucx::kInProgress &&
                          context_.calls.request_check_status(closing) == ucx::kInProgress;
      return (closes || !under_way_.empty()) && std::chrono::steady_clock::now() < until;
    };
    while (goes_on()) context_.calls.worker_progress(worker_);
    if (ucx::status_of(closing) == ucx::kInProgress) context_.calls.request_free(closing);
  }
  for (ucx::RemoteKey* key : keys_) context_.calls.rkey_destroy(key);
  if (worker_ != nullptr) context_.calls.worker_destroy(worker_);
}

Blob UcxWorker::address() const {
  ucx::Address* address = nullptr;
  std::size_t bytes = 0;
  context_.check(context_.calls.worker_get_address(worker_, &address, &bytes), "UCX gives no address");
  const auto* begin = reinterpret_cast<const std::uint8_t*>(address);
  Blob blob(begin, begin + bytes);
  context_.calls.worker_release_address(worker_, address);
  return blob;
}

bool UcxWorker::progress() {
  stirs_ = context_.calls.worker_progress(worker_) != 0;
  return stirs_;
}

bool UcxWorker::rest() {
  if (stirs_) return false;
  const ucx::Status status = context_.calls.worker_arm(worker_);
  if (status != ucx::kOk && status != ucx::kBusy && good()) why_ = "UCX does not wake: " + context_.text(status);
  return status != ucx::kBusy;
}

void UcxWorker::on_error(void* self, ucx::Endpoint*, ucx::Status status) {
  auto* worker = static_cast<UcxWorker*>(self);
  if (worker->good()) worker->why_ = "UCX lost the source: " + worker->context_.text(status);
}

void UcxWorker::connect(const Blob& address, const std::vector<Blob>& keys) {
  ucx::EndpointParams params{.field_mask = ucx::kSetRemoteAddress | ucx::kSetErrorMode | ucx::kSetErrorHandler,
                             .address = reinterpret_cast<const ucx::Address*>(address.data()),
                             .err_mode = ucx::kErrorsOfPeer,
                             .err_handler = {&UcxWorker::on_error, this}};
  // Without a watch on the peer UCX ends the process when a network fails. Shared memory cannot have one, nor needs it:
  // where UCX_TLS leaves nothing else, the connection's own end says that the peer is gone.
  watches_peer_ = context_.calls.ep_create(worker_, &params, &endpoint_) == ucx::kOk;
  if (!watches_peer_) {
    params.err_mode = ucx::kErrorsUnhandled;
    context_.check(context_.calls.ep_create(worker_, &params, &endpoint_), "UCX has no way to the source");
  }
  for (const Blob& key : keys) {
    ucx::RemoteKey* unpacked = nullptr;
    context_.check(context_.calls.ep_rkey_unpack(endpoint_, key.data(), &unpacked), "the source's key is not usable");
    keys_.push_back(unpacked);
  }
}

bool UcxWorker::read(void* to, std::uint64_t from, std::size_t bytes, std::size_t key, const UcxMemory& memory,
                     void* tag) {
  Get& get = under_way_.emplace_back(Get{this, tag, {}});
  get.self = std::prev(under_way_.end());
  const ucx::RequestParam param{.op_attr_mask = ucx::kSetCallback | ucx::kSetUserData | ucx::kSetMemory,
                                .cb = &UcxWorker::on_read,
                                .user_data = &get,
                                .memh = memory.handle()};
  void* result = context_.calls.get_nbx(endpoint_, to, bytes, from, keys_[key], &param);
  const ucx::Status status = ucx::status_of(result);
  if (status != ucx::kInProgress) on_read(nullptr, status, &get);  // No request, so no callback.
  return good();
}

void UcxWorker::on_read(void* request, ucx::Status status, void* context) {
  auto* get = static_cast<Get*>(context);
  UcxWorker& worker = *get->worker;
  void* tag = get->tag;
  worker.under_way_.erase(get->self);
  if (request != nullptr) worker.context_.calls.request_free(request);
  if (status != ucx::kOk && worker.good()) worker.why_ = "a read failed: " + worker.context_.text(status);
  worker.ended(tag);
}

std::string UcxWorker::transports() const {
  if (context_.minor < ucx::kTransportsMinor) return {};
  ucx::Transport used[16]{};
  ucx::EndpointAttr attr{.field_mask = ucx::kGetTransports,
                         .transports = {used, std::size(used), sizeof(ucx::Transport)}};
  if (context_.calls.ep_query(endpoint_, &attr) != ucx::kOk) return {};
  // TCP reads only where there is nothing else. Beside others it sets up the way, and watches the peer.
  std::string names, tcp;
  for (unsigned i = 0; i < attr.transports.num_entries; ++i) {
    const std::string_view transport = used[i].transport_name;
    const std::string name = std::string(transport) + "/" + used[i].device_name;
    std::string& list = transport == "tcp" ? tcp : names;
    if (list.find(name) == std::string::npos) list += (list.empty() ? "" : ", ") + name;
  }
  return names.empty() ? tcp : names;
}

}  // namespace baton::transfer
