// The progress thread's connections: how they begin, which way their chunks go, what is read and sent.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "transfer/agent.h"
#include "transfer/sockets.h"

namespace baton::transfer {
namespace {

constexpr int kReadsPerTurn = 16;  // After so many, other connections get their turn.
constexpr double kProofS = 0.5;    // A backend that takes longer to prove itself is not taken.
constexpr double kFenceS = 0.5;    // Time for an adapter's running writes to end; then the connection is closed.

}  // namespace

// ---------------------------------------------------------------- backends

Site Agent::site(ConnectionId id, Connection& connection) {
  const Converter* converter = connection.converter.get();
  const Pool& pool = converter == nullptr ? pool_ : converter->pool();
  const std::uint64_t chunk_bytes_max = converter == nullptr ? chunk_bytes_max_ : converter->chunk_bytes_max();
  return {id, *connection.stream, pool, chunk_bytes_max, happened_, fabrics_};
}

void Agent::stage(const Stage& action) {
  Connection* at = find(action.connection);
  if (at == nullptr) return;
  try {
    at->converter = std::make_unique<Converter>(action.source, core_.options().limits, layout_pool_.value());
  } catch (const std::bad_alloc&) {
    drop(action.connection, "there is no memory to convert the source's blocks in");
  }
}

void Agent::offer(const OfferBackend& action) {
  Connection* at = find(action.connection);
  if (at == nullptr) return;
  std::string why;
  const Backend& backend = *find_backend(action.backend);
  const Site own = site(action.connection, *at);
  at->tried = backend.at_source(own, why);
  const bool ok = at->tried != nullptr;
  if (ok) watch_path(action.connection, *at->tried);
  const bool fits = backend.fits == nullptr || backend.fits(own);
  happened_.push_back(BackendOffered{action.connection, ok, ok ? at->tried->offer() : Blob{}, std::move(why), fits});
}

void Agent::accept_offer(const AcceptBackend& action) {
  Connection* at = find(action.connection);
  if (at == nullptr) return;
  if (at->answer_by_s != 0) return drop(action.connection, kBrokenProtocol);
  std::string why = "the sink has no such backend";
  bool fits = true;
  const Backend* backend = find_backend(action.backend);
  const bool again = at->tried != nullptr && at->tried_backend == backend;
  if (backend != nullptr && backend->prepare != nullptr && at->converter != nullptr) {
    at->tried = nullptr;
    why = "it reads into registered memory only, and the KV layouts differ";
    fits = false;
  } else if (!again) {
    at->tried = backend == nullptr ? nullptr : backend->at_sink(site(action.connection, *at), action.offer, why);
    at->tried_backend = backend;
    if (at->tried != nullptr) watch_path(action.connection, *at->tried);
  } else if (!at->tried->resume(action.offer)) {
    why = at->tried->why();
    at->tried = nullptr;
  }
  if (at->tried == nullptr) {
    happened_.push_back(BackendAccepted{action.connection, false, {}, std::move(why), fits});
    return;
  }
  at->answer_by_s = now_s() + kProofS;
  proving_.push_back(action.connection);
  working_.push_back(action.connection);
}

// Answers the source's offer, once there is a proof or there will be none.
void Agent::answer(ConnectionId id, Connection& connection) {
  const DataPath::Turn turn = connection.tried->advance();
  const bool broken = turn == DataPath::Turn::broken;
  if (turn == DataPath::Turn::more) working_.push_back(id);
  std::optional<Blob> proof = broken ? std::nullopt : connection.tried->proof();
  if (!proof && !broken && now_s() < connection.answer_by_s) return;
  connection.answer_by_s = 0;
  std::erase(proving_, id);
  if (proof) {
    happened_.push_back(BackendAccepted{id, true, std::move(*proof), connection.tried->note()});
  } else {
    happened_.push_back(BackendAccepted{id, false, {}, broken ? connection.tried->why() : "its proof takes too long"});
    connection.tried = nullptr;
  }
}

void Agent::check(const CheckBackend& action) {
  Connection* at = find(action.connection);
  if (at == nullptr || at->tried == nullptr) return;
  const bool good = at->tried->check(action.proof);
  if (good && at->tried->has_more_to_offer()) {
    happened_.push_back(BackendOffered{action.connection, true, at->tried->offer(), {}});
  } else {
    happened_.push_back(BackendChecked{action.connection, good});
  }
}

void Agent::use(const UseBackend& action) {
  Connection* at = find(action.connection);
  if (at == nullptr) return;
  if (at->answer_by_s != 0) return drop(action.connection, kBrokenProtocol);  // It did not wait for the answer.
  std::string why;
  // The connection's own way needs no offer.
  if (action.backend == kTcp.name) at->tried = kTcp.at_sink(site(action.connection, *at), {}, why);
  if (at->tried == nullptr) return drop(action.connection, kBrokenProtocol);
  at->path = std::move(at->tried);
  at->path->use(action.checksum);
}

// The descriptor leaves epoll when the path closes it.
void Agent::watch_path(ConnectionId id, const DataPath& path) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = id | kPathBit}};
  if (path.fd() >= 0 && ::epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, path.fd(), &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  }
}

// One chunk per connection, and one conversion; whether there are more.
bool Agent::advance_all() {
  std::vector<ConnectionId> working = std::exchange(working_, {});
  if (!proving_.empty()) working.insert(working.end(), proving_.begin(), proving_.end());
  std::sort(working.begin(), working.end());
  working.erase(std::unique(working.begin(), working.end()), working.end());
  for (const ConnectionId id : working) {
    Connection* at = find(id);
    if (at == nullptr) continue;
    if (at->answer_by_s != 0) {
      answer(id, *at);
      continue;
    }
    DataPath* path = at->path != nullptr ? at->path.get() : at->tried.get();
    if (path == nullptr) continue;
    const DataPath::Turn turn = path->advance();
    if (turn == DataPath::Turn::broken) {
      const std::string why = path->why();
      drop(id, why);
      continue;
    }
    const bool converts = at->converter != nullptr && at->converter->advance(happened_);
    if (converts || turn == DataPath::Turn::more) working_.push_back(id);
  }
  lift_fences();
  carry_out_all();
  return !working_.empty();
}

// ---------------------------------------------------------------- the end of a pull's writes

void Agent::stop_placing(PullId pull) {
  for (auto& [id, connection] : connections_) {
    if (connection.path != nullptr) connection.path->stop_placing(pull);
    if (connection.converter != nullptr) connection.converter->stop(pull);
  }
  fences_.push_back({pull, now_s() + kFenceS});
  lift_fences();
}

void Agent::lift_fences() {
  const double now = fences_.empty() ? 0 : now_s();
  std::erase_if(fences_, [&](const Fence& fence) {
    std::vector<ConnectionId> writing;
    for (const auto& [id, connection] : connections_) {
      if (connection.path != nullptr && connection.path->places(fence.pull)) writing.push_back(id);
    }
    if (!writing.empty() && now < fence.until_s) return false;
    for (const ConnectionId id : writing) drop(id, "the adapter did not end what a stopped pull had begun");
    happened_.push_back(PlacingStopped{fence.pull});
    return true;
  });
}

// Closes the connections at the end, and with them all running writes.
void Agent::end_placing() {
  connections_.clear();
  lift_fences();
  carry_out_all();
}

// ---------------------------------------------------------------- connections

void Agent::connect(const Connect& action) {
  const auto own = std::find_if(rails_.begin(), rails_.end(),
                                [&](const Rail& rail) { return !rail.label.empty() && rail.label == action.label; });
  const int fd = begin_connect(action.address, own == rails_.end() ? "" : own->address);
  if (fd < 0) {
    happened_.push_back(Closed{action.connection, std::strerror(errno), errno == ECONNREFUSED});
    return;
  }
  tune(fd);
  Connection& connection = connections_[action.connection];
  connection.stream = std::make_unique<Stream>(fd, action.connection, happened_);
  connection.connecting = true;
  watch(action.connection, connection, EPOLLOUT);
}

void Agent::watch(ConnectionId id, Connection& connection, std::uint32_t events) {
  if (connection.watched == events) return;
  epoll_event event{.events = events, .data = {.u64 = id}};
  const int operation = connection.watched == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  if (::epoll_ctl(epoll_fd_, operation, connection.stream->fd(), &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  }
  connection.watched = events;
}

void Agent::drop(ConnectionId id, std::string why, bool refused) {
  if (connections_.erase(id) == 0) return;
  std::erase(proving_, id);
  happened_.push_back(Closed{id, std::move(why), refused});
}

void Agent::on_ready(std::uint64_t token, std::uint32_t events) {
  if (token == kListenToken) return accept_all();
  if (token == kWakeToken) {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto taken = ::read(wake_fd_, &count, sizeof count);
    return;
  }
  if ((token & kPathBit) != 0) return working_.push_back(token & ~kPathBit);
  Connection* at = find(token);
  if (at == nullptr) return;
  if (at->connecting) return finish_connect(token, *at);
  if ((events & EPOLLOUT) != 0) dirty_.push_back(token);
  // Answers go out at the turn's end, in one message with the result of their chunk.
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) read(token);
}

void Agent::accept_all() {
  for (const int listener : listen_fds_) accept_all(listener);
}

void Agent::accept_all(int listener) {
  while (true) {
    const int fd = ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      const bool short_of = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      return short_of ? pause_accepting() : void();  // Otherwise none is left, or it is gone again.
    }
    tune(fd);
    const ConnectionId id = next_accepted_;
    next_accepted_ += 2;
    Connection& connection = connections_[id];
    connection.stream = std::make_unique<Stream>(fd, id, happened_);
    watch(id, connection, EPOLLIN);
    happened_.push_back(Accepted{id});
  }
}

// Waiting connections cannot be accepted without a free descriptor, and epoll would report them endlessly.
void Agent::pause_accepting() {
  for (const int listener : listen_fds_) ::epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, listener, nullptr);
  accept_again_s_ = now_s() + kAcceptPauseS;
}

void Agent::resume_accepting() {
  if (accept_again_s_ == 0 || now_s() < accept_again_s_) return;
  const auto watched = [this](int fd) { return watch_own(fd, kListenToken) || errno == EEXIST; };
  const bool all = std::all_of(listen_fds_.begin(), listen_fds_.end(), watched);
  accept_again_s_ = all ? 0 : now_s() + kAcceptPauseS;
}

void Agent::finish_connect(ConnectionId id, Connection& connection) {
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(connection.stream->fd(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) return drop(id, std::strerror(error), error == ECONNREFUSED);
  connection.connecting = false;
  watch(id, connection, EPOLLIN);
  happened_.push_back(Connected{id});
}

void Agent::read(ConnectionId id) {
  for (int turn = 0; turn < kReadsPerTurn; ++turn) {
    Connection* at = find(id);
    if (at == nullptr) return;
    bool more = false;
    if (!at->stream->receive(more)) return drop(id, at->stream->why());
    // After a data header the core decides where its payload goes before the next frame is read.
    while (true) {
      const std::size_t before = happened_.size();
      if (!at->stream->parse(happened_)) return drop(id, at->stream->why());
      if (happened_.size() == before) break;
      carry_out_all();
      at = find(id);
      if (at == nullptr) return;
    }
    if (!more) return;
  }
}

void Agent::flush_all() {
  for (const ConnectionId id : std::exchange(dirty_, {})) {
    Connection* at = find(id);
    if (at == nullptr || at->connecting) continue;
    if (!at->stream->flush()) {
      drop(id, at->stream->why());
      continue;
    }
    watch(id, *at, at->stream->wants_write() ? EPOLLIN | EPOLLOUT : EPOLLIN);
  }
}

}  // namespace baton::transfer
