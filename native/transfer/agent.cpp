#include "transfer/agent.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <fstream>
#include <stdexcept>
#include <system_error>

#include "transfer/cuda_pool.h"
#include "transfer/region.h"
#include "transfer/sockets.h"
#include "transfer/verbs_device.h"

namespace baton::transfer {
namespace {

constexpr double kGoodbyeS = 0.2;  // Time at the end for frames that are still to be sent.
constexpr double kSleepS = 3600;   // Longest sleep of the thread: for later alarms it sleeps again.
constexpr double kLateS = 0.25;  // A step that comes so long after the core's alarm shows that the process stood still.
constexpr double kCatchUpS = 0.1;  // Time to read what arrived meanwhile before that alarm.

void check_backends(const Options& options) {
  if (options.backends.empty()) throw std::invalid_argument("at least one backend is needed");
  for (const auto& name : options.backends) {
    if (find_backend(name) == nullptr) throw std::invalid_argument("there is no backend '" + name + "'");
  }
  [[maybe_unused]] const auto choices = parse_verbs_devices(options.fabric.verbs_devices);
  if (options.secret.size() > kTextBytesMax) throw std::invalid_argument("the secret is too long");
}

// Each start of an agent is another incarnation, even on the same port.
Options with_entropy(Options options) {
  check_backends(options);
  const auto fill = [](void* at, std::size_t size) {
    if (::getrandom(at, size, 0) != static_cast<ssize_t>(size)) {
      throw std::system_error(errno, std::generic_category(), "no randomness");
    }
  };
  fill(options.entropy.data(), options.entropy.size());
  for (const Backend* backend : backends()) {
    if (backend->striped) options.striped.emplace_back(backend->name);
    if (backend->local) options.local.emplace_back(backend->name);
  }
  // Containers of one host have it in common; whether they share memory, too, shows when it is tried.
  if (std::ifstream boot("/proc/sys/kernel/random/boot_id"); options.host.empty()) std::getline(boot, options.host);
  while (options.incarnation == 0) fill(&options.incarnation, sizeof options.incarnation);
  return options;
}

}  // namespace

Agent::Agent(Options options, const std::vector<std::string>& listen)
    : core_(options = with_entropy(std::move(options))), reports_max_(options.limits.reports) {
  try {
    listen_on_all(listen);
  } catch (...) {
    close_all();
    throw;
  }
  endpoint_ = format_endpoint({rails_, options.incarnation});
  epoll_fd_ = ::epoll_create1(EPOLL_CLOEXEC);
  wake_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  notify_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  const auto watch_listener = [this](int fd) { return watch_own(fd, kListenToken); };
  const bool made = epoll_fd_ >= 0 && wake_fd_ >= 0 && notify_fd_ >= 0 && watch_own(wake_fd_, kWakeToken) &&
                    std::all_of(listen_fds_.begin(), listen_fds_.end(), watch_listener);
  if (!made) {
    const int error = errno;
    close_all();
    throw std::system_error(error, std::generic_category(), "cannot set the agent up");
  }
  thread_ = std::thread(&Agent::run, this);
}

Agent::~Agent() {
  close();
  close_all();
}

void Agent::listen_on_all(const std::vector<std::string>& listen) {
  if (listen.empty() || listen.size() > kRailsMax) {
    throw std::invalid_argument("an agent listens on 1 to " + std::to_string(kRailsMax) + " addresses");
  }
  for (const std::string& text : listen) {
    auto rail = parse_rail(text, true);
    if (!rail) throw std::invalid_argument("'" + text + "' is not an address: host:port[@label][~distance]");
    const Listening listening = listen_on(rail->address);
    listen_fds_.push_back(listening.fd);
    rail->address = listening.address;
    rails_.push_back(std::move(*rail));
  }
}

void Agent::close_all() {
  for (const int fd : std::exchange(listen_fds_, {})) ::close(fd);
  for (const int fd : {epoll_fd_, wake_fd_, notify_fd_}) {
    if (fd >= 0) ::close(fd);
  }
}

bool Agent::watch_own(int fd, std::uint64_t token) const {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = token}};
  return ::epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) == 0;
}

double Agent::now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---------------------------------------------------------------- any thread

void Agent::check_usable_locked() const {
  if (!failure_.empty()) throw std::runtime_error("the transfer agent failed: " + failure_);
  if (closed_) throw std::runtime_error("the transfer agent is closed");
  if (reports_.size() >= reports_max_) throw std::runtime_error("the agent's events are not being polled");
}

// Peers must not be taken for silent because nothing they sent could be read: the alarm that was missed is still ahead.
// Once: where this thread is always late, alarms must come all the same.
double Agent::core_time_s_locked() {
  const double time_s = now_s() - stood_still_s_, alarm_s = core_.wake_s();
  const bool late = time_s > alarm_s + kLateS && alarm_s != put_off_s_;
  core_time_s_ = std::max(core_time_s_, late ? alarm_s - kCatchUpS : time_s);
  if (late) {
    put_off_s_ = alarm_s;
    stood_still_s_ += time_s - core_time_s_;
  }
  return core_time_s_;
}

void Agent::step(std::span<const Event> events) {
  const std::lock_guard lock(mutex_);
  step_locked(events);
}

void Agent::step_locked(std::span<const Event> events) {
  const bool quiet = reports_.empty();
  for (Action& action : core_.step(core_time_s_locked(), events)) {
    if (auto* report = std::get_if<Report>(&action)) {
      reports_.push_back(std::move(*report));
    } else {
      actions_.push_back(std::move(action));
    }
  }
  if (!quiet || reports_.empty()) return;
  announce();
}

void Agent::announce() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(notify_fd_, &one, sizeof one);
}

void Agent::wake() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_fd_, &one, sizeof one);
}

void Agent::set_pool(Geometry geometry, Pool pool) {
  {
    const std::lock_guard lock(mutex_);
    check_usable_locked();
    core_.check_geometry(geometry);
  }
  if (pool.layers.size() != geometry.tensors()) {
    throw std::invalid_argument(std::to_string(pool.layers.size()) + " addresses are not those of a pool of " +
                                std::to_string(geometry.tensors()) + " tensors");
  }
  if (pool.stride_bytes < geometry.block_bytes) throw std::invalid_argument("blocks overlap: the stride is too small");
  pool.blocks = geometry.blocks;
  if (pool.region != nullptr) {
    const auto fits = [&](const std::uint8_t* layer) {
      const std::uint8_t* begin = pool.region->data();
      const std::uint64_t size = pool.layer_bytes();
      return layer >= begin && size <= pool.region->bytes() &&
             static_cast<std::uint64_t>(layer - begin) <= pool.region->bytes() - size;
    };
    if (!std::all_of(pool.layers.begin(), pool.layers.end(), fits)) {
      throw std::invalid_argument("a layer does not lie in the region");
    }
  }
  if (pool.device >= 0) {
    for (const std::string& name : core_.options().backends) {
      if (find_backend(name)->device) continue;
      throw std::invalid_argument(
          "a pool in CUDA memory moves by cuda-ipc, cuda-put and gpudirect only, and this agent's backends name " +
          name);
    }
  }
  std::optional<layout::Pool> layout_pool;
  if (geometry.layout) layout_pool.emplace(*geometry.layout, pool.layers, pool.blocks, pool.stride_bytes);
  // The lock is free meanwhile: this may take seconds.
  Fabrics fabrics;
  for (const std::string& name : core_.options().backends) {
    if (const Backend* backend = find_backend(name); backend->prepare != nullptr) {
      backend->prepare(core_.options().fabric, pool, fabrics);
    }
  }
  const std::lock_guard lock(mutex_);
  check_usable_locked();
  core_.set_geometry(std::move(geometry));
  chunk_bytes_max_ = chunk_blocks(core_.geometry(), core_.options().limits) * core_.geometry().block_bytes;
  pool_ = std::move(pool);
  layout_pool_ = std::move(layout_pool);
  fabrics_ = std::move(fabrics);
}

void Agent::command(Event event) {
  {
    const std::lock_guard lock(mutex_);
    check_usable_locked();
    const double wake_s = core_.wake_s();
    step_locked({&event, 1});
    if (actions_.empty() && core_.wake_s() >= wake_s) return;
  }
  wake();
}

std::uint64_t Agent::open_lease(const Key& key, double unclaimed_ttl_s) {
  std::uint64_t generation = 0;
  {
    const std::lock_guard lock(mutex_);
    check_usable_locked();
    const Event event = OpenLease{key, unclaimed_ttl_s};
    step_locked({&event, 1});
    generation = core_.generation(key);
  }
  wake();
  return generation;
}

void Agent::post_ready_after(PostReady ready, std::uint64_t stream) {
  std::shared_ptr<CudaPool> cuda;
  {
    const std::lock_guard lock(mutex_);
    check_usable_locked();
    cuda = fabrics_.cuda;
  }
  if (cuda == nullptr) throw std::invalid_argument("this agent's pool does not lie in CUDA memory");
  ready.released = cuda->release_after(stream);
  command(ready);
}

std::vector<Report> Agent::poll() {
  const std::lock_guard lock(mutex_);
  std::uint64_t count = 0;
  [[maybe_unused]] const auto taken = ::read(notify_fd_, &count, sizeof count);
  std::vector<Report> reports(std::make_move_iterator(reports_.begin()), std::make_move_iterator(reports_.end()));
  reports_.clear();
  if (!failure_.empty()) {
    if (reports.empty()) throw std::runtime_error("the transfer agent failed: " + failure_);
    announce();  // The failure is still to be told.
  }
  return reports;
}

Stats Agent::stats() {
  const std::lock_guard lock(mutex_);
  return core_.stats();
}

void Agent::close() {
  const std::lock_guard closing(closing_);  // Whoever comes second returns when nothing is written any more, too.
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    const Event event = Shutdown{};
    step_locked({&event, 1});
  }
  stopping_ = true;
  wake();
  thread_.join();
  for (const int fd : std::exchange(listen_fds_, {})) ::close(fd);  // Their ports may be another agent's from here on.
}

// ---------------------------------------------------------------- the progress thread

void Agent::run() {
  try {
    run_until_stopped();
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    failure_ = error.what();
    announce();
  }
  connections_.clear();
  Fabrics unused;  // Another thread may be posting what its stream will release.
  const std::lock_guard lock(mutex_);
  std::swap(unused, fabrics_);
}

void Agent::run_until_stopped() {
  double stop_s = 0;
  while (true) {
    carry_out_all();
    const bool more = advance_all();
    flush_all();
    if (stopping_) {
      if (stop_s == 0) stop_s = now_s() + kGoodbyeS;
      const bool unsent = std::any_of(connections_.begin(), connections_.end(),
                                      [](const auto& entry) { return entry.second.stream->wants_write(); });
      const bool busy = unsent || stats().pulls > 0 || !happened_.empty();
      if (!busy || now_s() >= stop_s) return end_placing();
    }
    epoll_event ready[64];
    const int count = ::epoll_wait(epoll_fd_, ready, 64, more ? 0 : timeout_ms());
    if (count < 0 && errno != EINTR) throw std::system_error(errno, std::generic_category(), "epoll_wait");
    for (int i = 0; i < count; ++i) on_ready(ready[i].data.u64, ready[i].events);
    resume_accepting();
    step({});
  }
}

int Agent::timeout_ms() {
  const std::lock_guard lock(mutex_);
  if (!actions_.empty() || !happened_.empty()) return 0;
  if (stopping_) return 10;
  const double alarm_s = core_.wake_s() + stood_still_s_;
  double wake_s = accept_again_s_ == 0 ? alarm_s : std::min(alarm_s, accept_again_s_);
  for (const Fence& fence : fences_) wake_s = std::min(wake_s, fence.until_s);
  for (const ConnectionId id : proving_) wake_s = std::min(wake_s, connections_.at(id).answer_by_s);
  const double left_s = wake_s - now_s();
  if (left_s <= 0) return 0;
  return static_cast<int>(std::ceil(std::min(left_s, kSleepS) * 1000));
}

// Ends, because each round only does what the rounds before, or callers, have caused.
void Agent::carry_out_all() {
  while (true) {
    std::vector<Action> actions;
    {
      const std::lock_guard lock(mutex_);
      if (!happened_.empty()) {
        const std::vector<Event> happened = std::exchange(happened_, {});
        step_locked(happened);
      }
      actions = std::exchange(actions_, {});
    }
    if (actions.empty()) return;
    for (Action& action : actions) carry_out(action);
  }
}

Agent::Connection* Agent::find(ConnectionId id) {
  const auto found = connections_.find(id);
  return found == connections_.end() ? nullptr : &found->second;
}

namespace {

template <class... Handlers>
struct Overloaded : Handlers... {
  using Handlers::operator()...;
};

}  // namespace

void Agent::carry_out(Action& action) {
  std::visit(Overloaded{
                 [&](const Connect& a) { connect(a); },
                 [&](const Close& a) {
                   // The last frames, such as a refusal, should still reach the peer.
                   if (Connection* at = find(a.connection)) [[maybe_unused]]
                     const bool sent = at->stream->flush();
                   drop(a.connection, a.detail);
                 },
                 [&](Send& a) {
                   Connection* at = find(a.connection);
                   if (at == nullptr) return;
                   if (!at->stream->send(std::move(a.frame))) return drop(a.connection, at->stream->why());
                   dirty_.push_back(a.connection);
                 },
                 [&](const Serve& a) {
                   Connection* at = find(a.connection);
                   if (at == nullptr || at->path == nullptr) return;
                   at->path->serve(a);
                   working_.push_back(a.connection);
                   dirty_.push_back(a.connection);
                 },
                 [&](const StopServing& a) {
                   Connection* at = find(a.connection);
                   if (at != nullptr && at->path != nullptr) at->path->stop_serving(a.pull);
                 },
                 [&](const Credit& a) {
                   Connection* at = find(a.connection);
                   if (at == nullptr || at->path == nullptr) return;
                   if (!at->path->credit(a.slot)) return drop(a.connection, kBrokenProtocol);
                   working_.push_back(a.connection);
                 },
                 [&](const Stage& a) { stage(a); },
                 [&](const Place& a) {
                   Connection* at = find(a.connection);
                   if (at == nullptr || at->path == nullptr) return;
                   if (!at->path->place(a)) return drop(a.connection, kBrokenProtocol);
                   working_.push_back(a.connection);
                 },
                 [&](const Convert& a) {
                   Connection* at = find(a.connection);
                   if (at == nullptr || at->converter == nullptr) return;
                   at->converter->convert(a);
                   working_.push_back(a.connection);
                 },
                 [&](const Discard& a) {
                   if (Connection* at = find(a.connection)) at->stream->discard();
                 },
                 [&](const StopPlacing& a) { stop_placing(a.pull); },
                 [&](const OfferBackend& a) { offer(a); },
                 [&](const AcceptBackend& a) { accept_offer(a); },
                 [&](const CheckBackend& a) { check(a); },
                 [&](const UseBackend& a) { use(a); },
                 [](const Report&) {},  // Taken out when the core gave it.
             },
             action);
}

}  // namespace baton::transfer
