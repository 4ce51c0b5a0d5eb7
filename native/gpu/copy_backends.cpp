// The backends of copies: a thread of the host, and CUDA.
#include <cstring>
#include <deque>
#include <thread>

#include "gpu/copy_engine.h"

namespace baton::gpu {
namespace {

class HostCopies final : public CopyBackend {
 public:
  explicit HostCopies(OnEnded on_ended) : on_ended_(std::move(on_ended)), thread_(&HostCopies::run, this) {}
  ~HostCopies() override {
    {
      const std::lock_guard held(lock_);
      closing_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void pin(std::uint64_t, std::uint64_t) override {}
  void unpin(std::uint64_t) override {}
  void start(Ticket ticket, BatonGpuDirection, std::span<const Copy> copies, std::optional<std::uint64_t>) override {
    {
      const std::lock_guard held(lock_);
      work_.push_back({ticket, {copies.begin(), copies.end()}});
    }
    changed_.notify_all();
  }
  void check() override {}

 private:
  struct Work {
    Ticket ticket = 0;
    std::vector<Copy> copies;
  };

  void run() {
    std::unique_lock held(lock_);
    while (true) {
      changed_.wait(held, [&] { return closing_ || !work_.empty(); });
      if (work_.empty()) return;
      const Work now = std::move(work_.front());
      work_.pop_front();
      held.unlock();
      for (const Copy& copy : now.copies) {
        std::memcpy(reinterpret_cast<void*>(copy.to), reinterpret_cast<const void*>(copy.from), copy.bytes);
      }
      on_ended_(now.ticket);
      held.lock();
    }
  }

  OnEnded on_ended_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Work> work_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace

class DeviceCopies final : public CopyBackend {
 public:
  DeviceCopies(std::shared_ptr<Device> device, OnEnded on_ended)
      : device_(std::move(device)), on_ended_(std::move(on_ended)) {
    const auto copied = [](void* self, std::uint64_t ticket) { static_cast<DeviceCopies*>(self)->on_ended_(ticket); };
    device_->check(device_->calls_.copies_open(device_->gpu_, copied, this, &copies_));
  }
  ~DeviceCopies() override { device_->calls_.copies_close(copies_); }

  void pin(std::uint64_t address, std::uint64_t bytes) override {
    device_->check(device_->calls_.copies_pin(copies_, address, bytes));
  }
  void unpin(std::uint64_t address) override { device_->check(device_->calls_.copies_unpin(copies_, address)); }
  void start(Ticket ticket, BatonGpuDirection direction, std::span<const Copy> copies,
             std::optional<std::uint64_t> after) override {
    device_->check(device_->calls_.copies_start(copies_, ticket, direction, copies.data(),
                                                static_cast<std::uint32_t>(copies.size()), after.has_value() ? 1 : 0,
                                                after.value_or(0)));
  }
  void check() override { device_->check(device_->calls_.copies_check(copies_)); }

 private:
  std::shared_ptr<Device> device_;
  OnEnded on_ended_;
  BatonGpuCopies* copies_ = nullptr;
};

MakeBackend host_copies() {
  return [](OnEnded on_ended) { return std::make_unique<HostCopies>(std::move(on_ended)); };
}

MakeBackend device_copies(std::shared_ptr<Device> device) {
  return [device](OnEnded on_ended) { return std::make_unique<DeviceCopies>(device, std::move(on_ended)); };
}

}  // namespace baton::gpu
