#include "gpu/copy_engine.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace baton::gpu {
namespace {

// How often a wait looks whether the device has failed.
constexpr std::chrono::milliseconds kCheckInterval{100};

}  // namespace

CopyEngine::CopyEngine(const MakeBackend& make) : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "no event descriptor");
  try {
    backend_ = make([this](Ticket ticket) { end(ticket, ""); });
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

CopyEngine::~CopyEngine() {
  while (true) {
    check();
    std::unique_lock held(lock_);
    if (changed_.wait_for(held, kCheckInterval, [&] { return under_way_.empty(); })) break;
  }
  for (const auto& [address, host] : hosts_) {
    try {
      backend_->unpin(address);
    } catch (const Error&) {
      continue;  // The device has failed, and with it the pinning.
    }
  }
  backend_.reset();
  ::close(fd_);
}

// ---------------------------------------------------------------- host memory

void CopyEngine::add_host(std::uint64_t address, std::uint64_t bytes) {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  if (bytes == 0 || (address | bytes) % page != 0 || address + bytes < address) {
    throw std::invalid_argument("registered memory is made of whole pages");
  }
  {
    const std::lock_guard held(lock_);
    const auto next = hosts_.lower_bound(address);
    const bool overlaps = (next != hosts_.end() && next->first < address + bytes) ||
                          (next != hosts_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > address);
    if (overlaps) throw std::invalid_argument("memory is registered twice");
    hosts_[address] = {bytes, 0};
  }
  try {
    backend_->pin(address, bytes);
  } catch (...) {
    const std::lock_guard held(lock_);
    hosts_.erase(address);
    throw;
  }
}

void CopyEngine::remove_host(std::uint64_t address) {
  {
    const std::lock_guard held(lock_);
    const auto at = hosts_.find(address);
    if (at == hosts_.end()) throw std::invalid_argument("the memory is not registered");
    if (at->second.batches > 0) throw std::invalid_argument("copies that have not ended use the memory");
    hosts_.erase(at);
  }
  backend_->unpin(address);
}

const std::pair<const std::uint64_t, CopyEngine::Host>* CopyEngine::find_host(std::uint64_t address,
                                                                              std::uint64_t bytes) const {
  auto at = hosts_.upper_bound(address);
  if (at == hosts_.begin()) return nullptr;
  --at;
  const Device::Range range{at->first, at->second.bytes};
  return range.holds(address, bytes) ? &*at : nullptr;
}

// ---------------------------------------------------------------- batches

BatonGpuDirection CopyEngine::direction_of(std::span<const Copy> copies, Batch& batch) const {
  std::optional<BatonGpuDirection> direction;
  for (const Copy& copy : copies) {
    const auto* const to = find_host(copy.to, copy.bytes);
    const auto* const from = find_host(copy.from, copy.bytes);
    if (copy.bytes == 0 || (to == nullptr) == (from == nullptr)) {
      throw std::invalid_argument("a copy is empty, or has not exactly one end in registered memory");
    }
    const auto own = to != nullptr ? BATON_GPU_TO_HOST : BATON_GPU_TO_DEVICE;
    if (direction.value_or(own) != own) throw std::invalid_argument("the copies of a batch go in both directions");
    direction = own;
    const std::uint64_t host = (to != nullptr ? to : from)->first;
    if (std::find(batch.hosts.begin(), batch.hosts.end(), host) == batch.hosts.end()) batch.hosts.push_back(host);
  }
  return *direction;
}

Ticket CopyEngine::submit(std::span<const Copy> copies, std::optional<std::uint64_t> after) {
  if (copies.empty() || copies.size() > kCopiesMax) {
    throw std::invalid_argument("a batch has 1 to " + std::to_string(kCopiesMax) + " copies, not " +
                                std::to_string(copies.size()));
  }
  Ticket ticket = 0;
  BatonGpuDirection direction{};
  {
    const std::lock_guard held(lock_);
    if (under_way_.size() + ended_.size() >= kBatchesMax) {
      throw Error(std::to_string(kBatchesMax) + " batches of copies have not ended or not been taken");
    }
    Batch batch;
    direction = direction_of(copies, batch);
    for (const std::uint64_t host : batch.hosts) ++hosts_.at(host).batches;
    ticket = ++last_;
    under_way_.emplace(ticket, std::move(batch));
  }
  try {
    backend_->start(ticket, direction, copies, after);
  } catch (...) {
    const std::lock_guard held(lock_);
    forget(under_way_.find(ticket));
    throw;
  }
  return ticket;
}

void CopyEngine::forget(std::map<Ticket, Batch>::iterator at) {
  if (at == under_way_.end()) return;
  for (const std::uint64_t host : at->second.hosts) --hosts_.at(host).batches;
  under_way_.erase(at);
}

void CopyEngine::end(Ticket ticket, const std::string& failure) {
  const std::lock_guard held(lock_);
  const auto at = under_way_.find(ticket);
  if (at == under_way_.end()) return;
  forget(at);
  ended_.push_back({ticket, failure});
  changed_.notify_all();
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(fd_, &one, sizeof one);
}

// A device that has failed ends no batch: then all of them have failed.
void CopyEngine::check() {
  std::vector<Ticket> tickets;
  {
    const std::lock_guard held(lock_);
    for (const auto& [ticket, batch] : under_way_) tickets.push_back(ticket);
  }
  if (tickets.empty()) return;
  try {
    backend_->check();
  } catch (const Error& failure) {
    for (const Ticket ticket : tickets) end(ticket, failure.what());
  }
}

std::vector<CopyEngine::Ended> CopyEngine::take() {
  check();
  const std::lock_guard held(lock_);
  std::uint64_t count = 0;
  [[maybe_unused]] const auto drained = ::read(fd_, &count, sizeof count);
  return std::exchange(ended_, {});
}

bool CopyEngine::wait(Ticket ticket, std::chrono::nanoseconds timeout) {
  const auto until = std::chrono::steady_clock::now() + timeout;
  while (true) {
    check();
    std::unique_lock held(lock_);
    const auto ended = [&] { return !under_way_.contains(ticket); };
    const auto now = std::chrono::steady_clock::now();
    if (ended() || now >= until) return ended();
    changed_.wait_for(held, std::min<std::chrono::nanoseconds>(until - now, kCheckInterval), ended);
  }
}

}  // namespace baton::gpu
