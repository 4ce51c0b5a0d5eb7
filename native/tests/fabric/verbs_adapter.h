// The adapters of this process, for fake_verbs.cpp: what peers see of its regions and queue pairs, and a thread that
// carries out what was posted.
//
// Internal linkage, as two of these stand-ins may be loaded into one process.
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/fabric/tables.h"
#include "transfer/verbs_abi.h"

namespace baton::tests {
namespace {

using namespace transfer::ibv;

using Clock = std::chrono::steady_clock;

constexpr int kDevices = 2, kMrs = 4096, kQps = 1024;
constexpr int kRemoteOperation = 11, kRdmaWrite = 0;

struct Control {
  Word devices_missing;
  Word ports_down;   // A bit for each device.
  Word infiniband;   // Instead of Ethernet.
  Word delay_ms;     // Delay of each operation; its bytes move at the end of it.
  Word hold;         // Operations do not begin while it is set.
  Word fail_post;    // The n-th post from now on is refused.
  Word fail_nth;     // The n-th operation from now on …
  Word fail_status;  // … completes with this.
  Word shrink;       // Regions registered while it is set end after 64 KiB, for peers.
  Word peer_memory;  // The kernel's module for a GPU's memory (nvidia-peermem) is loaded.
};

struct SharedMr {
  Word key;  // 0: none.
  std::int32_t access, pd;
  std::uint64_t begin, bytes, bytes_for_peers;
  std::uint64_t behind;  // Address of the memory in its process: another one than `begin` for a GPU's.
  [[nodiscard]] std::uint8_t* at(std::uint64_t address) const {
    return reinterpret_cast<std::uint8_t*>(behind + (address - begin));
  }
  std::uint64_t mapped;  // Bytes that are mapped there for this region.
  [[nodiscard]] bool on_gpu() const { return behind != begin; }
};

struct SharedQp {
  Word number;  // 0: none.
  Word state;
  std::uint32_t peer, first_packet_in;
  std::int32_t access, pd;
};

struct Table {
  Word contexts, pds, mrs, channels, cqs, qps;
  Word unflushed;                     // Writes into a GPU's memory that it does not see yet.
  Word operations, reads_0, reads_1;  // Carried out.
  Word sink_gid;                      // GID of the last queue pair that may have requests.
  Word pid;
  SharedMr mr[kMrs];
  SharedQp qp[kQps];
};

struct Work {
  SendWr request;
  Sge target;
  Clock::time_point due;
};

struct FakeChannel : CompChannel {
  std::deque<Cq*> events;
};

struct FakeQp;
struct Completion {
  Wc wc;
  FakeQp* qp;
  std::uint32_t retires;  // Requests whose places in the queue are free once this was polled.
};

struct FakeCq : Cq {
  std::deque<Completion> completions;
  bool armed = false;
  unsigned unacknowledged = 0;
};

struct FakeQp : Qp {
  SharedQp* shared = nullptr;
  QpCap cap{};
  std::deque<Work> work;
  std::uint32_t used = 0, unretired = 0;
  int peer_pid = 0;
  std::uint32_t first_packet_out = 0;
  int reads_max = 0;
};

struct FakePd : Pd {
  int id = 0;
};

Device* device(int number) {
  static Device devices[kDevices];
  std::snprintf(devices[number].name, kNameBytes, "fake_%d", number);
  return &devices[number];
}

int number_of(const Context* context) {
  return context->device == device(0) ? 0 : 1;
}

// The adapter of this process. One lock: its holder sees no operation half done.
class Adapter {
 public:
  static Adapter& get() {
    static Adapter* adapter = new Adapter;  // Never destroyed: agents may live as long as the process.
    return *adapter;
  }

  std::mutex lock;
  std::condition_variable changed;
  Control* control;
  Table* own;
  std::set<FakeQp*> queues;
  std::thread thread;

  // Makes what was written into a GPU's memory visible there.
  void flush_writes(void (*written)(std::uint64_t address, std::uint64_t bytes)) {
    const std::lock_guard held(lock);
    for (const Unflushed& write : unflushed_) {
      std::memcpy(write.to, write.bytes.data(), write.bytes.size());
      written(write.address, write.bytes.size());
    }
    unflushed_.clear();
    own->unflushed = 0;
  }

  void open() {
    if (own->contexts++ > 0) return;
    stopping_ = false;
    thread = std::thread(&Adapter::run, this);
  }
  void close() {
    {
      const std::lock_guard held(lock);
      if (--own->contexts > 0) return;
      stopping_ = true;
    }
    changed.notify_all();
    thread.join();
  }

  void complete(FakeQp& qp, const Work& work, int status) {
    ++qp.unretired;
    const bool read = work.request.opcode == kRdmaRead;
    if (status != kSuccess) fail(qp);
    if (status == kSuccess && (work.request.send_flags & kSignaled) == 0) return;
    auto& cq = *static_cast<FakeCq*>(qp.send_cq);
    if (cq.completions.size() >= static_cast<std::size_t>(cq.cqe)) misused("a completion queue overflows");
    Wc wc{.wr_id = work.request.wr_id, .status = status, .opcode = read ? 2 : 1, .qp_num = qp.qp_num};
    cq.completions.push_back({wc, &qp, std::exchange(qp.unretired, 0)});
    if (!std::exchange(cq.armed, false) || cq.channel == nullptr) return;
    auto& channel = *static_cast<FakeChannel*>(cq.channel);
    channel.events.push_back(&cq);
    const std::uint64_t one = 1;
    if (::write(channel.fd, &one, sizeof one) != sizeof one) misused("a completion channel is full");
  }
  void fail(FakeQp& qp) {
    qp.state = kQpError;
    qp.shared->state = kQpError;
  }
  void flush(FakeQp& qp) {
    while (!qp.work.empty()) {
      const Work work = qp.work.front();
      qp.work.pop_front();
      complete(qp, work, kFlushed);
    }
  }
  Table* table(int pid) {
    if (pid == ::getpid()) return own;
    Table*& known = tables_[pid];
    if (known == nullptr) known = map_file<Table>(folder_ + "/" + std::to_string(pid), 0);
    return known;
  }
  // Adapter with this local identifier on the simulated Infiniband.
  int pid_of(std::uint16_t lid) {
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      const int pid = std::atoi(entry.path().filename().c_str());
      if (pid > 0 && static_cast<std::uint16_t>(pid) == lid && ::kill(pid, 0) == 0) return pid;
    }
    return 0;
  }

 private:
  Adapter() {
    folder_ = folder_of("FAKE_VERBS_DIR");
    control = map_file<Control>(folder_ + "/control", O_CREAT);
    own = map_file<Table>(folder_ + "/" + std::to_string(::getpid()), O_CREAT);
    if (control == nullptr || own == nullptr) misused("FAKE_VERBS_DIR cannot be used");
    own->pid = ::getpid();
    ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  }

  void run() {
    std::unique_lock held(lock);
    while (!stopping_) {
      auto wake = Clock::now() + std::chrono::milliseconds(control->hold != 0 ? 5 : 1000);
      for (FakeQp* qp : queues) {
        if (qp->state == kQpError) flush(*qp);
        while (!qp->work.empty() && qp->state == kQpReadyToSend && control->hold == 0) {
          if (qp->work.front().due > Clock::now()) {
            wake = std::min(wake, qp->work.front().due);
            break;
          }
          const Work work = qp->work.front();
          qp->work.pop_front();
          ++own->operations;
          ++(number_of(qp->context) == 0 ? own->reads_0 : own->reads_1);
          complete(*qp, work, carry_out(*qp, work));
          if (qp->state == kQpError) flush(*qp);
        }
      }
      changed.wait_until(held, wake);
    }
  }

  static bool inside(const SharedMr& mr, std::uint64_t end, std::uint32_t key, std::uint64_t begin,
                     std::uint64_t bytes) {
    return static_cast<std::uint32_t>(mr.key.load()) == key && key != 0 && begin >= mr.begin && bytes <= end &&
           begin - mr.begin <= end - bytes;
  }

  int carry_out(FakeQp& qp, const Work& work) {
    if (control->fail_nth > 0 && --control->fail_nth == 0) return control->fail_status;
    const Sge& target = work.target;
    const SharedMr& local = own->mr[target.lkey % kMrs];
    const bool read = work.request.opcode == kRdmaRead;
    const bool writable = !read || (local.access & kLocalWrite) != 0;
    if (!inside(local, local.bytes, target.lkey, target.addr, target.length) || !writable ||
        local.pd != static_cast<FakePd*>(qp.pd)->id) {
      return kLocalProtection;
    }
    Table* peer = table(qp.peer_pid);
    if (peer == nullptr || ::kill(qp.peer_pid, 0) != 0) return kRetriesExceeded;
    const SharedQp& other = peer->qp[qp.shared->peer % kQps];
    const bool connected = static_cast<std::uint32_t>(other.number.load()) == qp.shared->peer &&
                           (other.state == kQpReadyToReceive || other.state == kQpReadyToSend) &&
                           other.peer == qp.qp_num && other.first_packet_in == qp.first_packet_out;
    if (!connected || (read && qp.reads_max == 0)) return kRetriesExceeded;
    const int right = read ? kRemoteRead : kRemoteWrite;
    const std::uint32_t key = work.request.rdma.rkey;
    const SharedMr& remote = peer->mr[key % kMrs];
    if (!inside(remote, remote.bytes_for_peers, key, work.request.rdma.remote_addr, target.length) ||
        (remote.access & right) == 0 || (other.access & right) == 0 || remote.pd != other.pd) {
      return kRemoteAccess;
    }
    std::vector<std::uint8_t> posted(read && local.on_gpu() ? target.length : 0);
    const iovec here{posted.empty() ? local.at(target.addr) : posted.data(), target.length};
    const iovec there{remote.at(work.request.rdma.remote_addr), target.length};
    const auto copy = read ? ::process_vm_readv : ::process_vm_writev;
    if (copy(qp.peer_pid, &here, 1, &there, 1, 0) != static_cast<ssize_t>(target.length)) {
      return errno == ESRCH ? kRetriesExceeded : kRemoteOperation;
    }
    if (!posted.empty()) {
      unflushed_.push_back({target.addr, local.at(target.addr), std::move(posted)});
      ++own->unflushed;
    }
    return kSuccess;
  }

  std::string folder_;
  std::map<int, Table*> tables_;
  struct Unflushed {
    std::uint64_t address;
    std::uint8_t* to;
    std::vector<std::uint8_t> bytes;
  };
  std::vector<Unflushed> unflushed_;  // Guarded by the lock.
  bool stopping_ = false;
};

Adapter& adapter() {
  return Adapter::get();
}

}  // namespace
}  // namespace baton::tests
