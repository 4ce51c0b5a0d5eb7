// A queue pair alone, over the fake adapters: the memory it may read, and the refusal of all writes.
#include <poll.h>

#include "tests/check.h"
#include "transfer/verbs_queue.h"

using namespace baton::transfer;

namespace {

constexpr std::uint64_t kBytes = 64 << 10;
constexpr int kWrite = 0;  // IBV_WR_RDMA_WRITE

struct End {
  explicit End(std::uint8_t content)
      : memory(kBytes, content),
        pool{.layers = {memory.data()}, .block_bytes = kBytes, .stride_bytes = kBytes, .blocks = 1},
        devices({.verbs_library = FAKE_VERBS, .verbs_devices = "fake_0"}, pool),
        device(devices.next()),
        queue(device, 4) {}
  // Waits as the agent does: for the descriptor, then for what has ended.
  bool wait() {
    std::vector<VerbsQueue::Batch> ended;
    while (ended.empty()) {
      pollfd waiting{queue.fd(), POLLIN, 0};
      CHECK(::poll(&waiting, 1, 5000) == 1);
      if (!queue.poll(ended)) return false;
    }
    return true;
  }
  bool read(std::uint64_t from, std::size_t bytes, std::uint32_t key) {
    const iovec local{memory.data(), bytes}, remote{reinterpret_cast<void*>(from), bytes};
    return queue.read({&local, 1}, device.layers[0].lkey(), {&remote, 1}, key, nullptr) && wait();
  }

  std::vector<std::uint8_t> memory;
  Pool pool;
  VerbsDevices devices;
  VerbsDevice& device;
  VerbsQueue queue;
};

struct Pair {
  Pair() {
    source.queue.connect(sink.queue.address());
    sink.queue.connect(source.queue.address());
  }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(source.memory.data()); }
  std::uint32_t key() const { return source.device.layers[0].rkey(); }
  End source{1}, sink{2};
};

}  // namespace

TEST(a_queue_reads_what_the_source_registered) {
  Pair pair;
  CHECK(pair.sink.read(pair.address() + 8, 100, pair.key()));
  CHECK(pair.sink.memory[99] == 1 && pair.sink.memory[100] == 2);
}

TEST(a_queue_reads_nothing_else) {
  Pair beyond;
  CHECK(!beyond.sink.read(beyond.address() + kBytes - 50, 100, beyond.key()));
  CHECK(beyond.sink.queue.why() == "a read failed: remote access error");
  Pair before;
  CHECK(!before.sink.read(before.address() - 1, 100, before.key()));
  Pair other_key;
  CHECK(!other_key.sink.read(other_key.address(), 100, other_key.key() + 1));
  CHECK(other_key.sink.memory[0] == 2);
}

TEST(no_peer_may_write) {
  Pair pair;
  ibv::Sge from{reinterpret_cast<std::uint64_t>(pair.sink.memory.data()), 100, pair.sink.device.layers[0].lkey()};
  ibv::SendWr write{.wr_id = 1, .sg_list = &from, .num_sge = 1, .opcode = kWrite, .send_flags = ibv::kSignaled};
  write.rdma.remote_addr = pair.address();
  write.rdma.rkey = pair.key();
  ibv::SendWr* refused = nullptr;
  const auto& adapter = pair.sink.device.context->ops;
  ibv::Qp* const qp = pair.sink.queue.handle();
  CHECK(adapter.post_send(qp, &write, &refused) == 0);
  pollfd waiting{pair.sink.queue.fd(), POLLIN, 0};
  CHECK(::poll(&waiting, 1, 5000) == 1);
  ibv::Wc done{};
  CHECK(adapter.poll_cq(qp->send_cq, 1, &done) == 1 && done.status == ibv::kRemoteAccess);
  CHECK(pair.source.memory == std::vector<std::uint8_t>(kBytes, 1));
}
