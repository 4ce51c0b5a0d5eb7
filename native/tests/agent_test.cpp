// Whole agents with their threads, under several callers at once: what the sanitizers are for.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>

#include "gpu/device.h"
#include "tests/check.h"
#include "tests/fake_adapters.h"
#include "transfer/agent.h"
#include "transfer/region.h"
#include "transfer/sockets.h"

using namespace baton::transfer;
namespace gpu = baton::gpu;

namespace {

constexpr std::uint32_t kLayers = 3, kBlocks = 64, kBlockTokens = 16;
constexpr std::uint64_t kBlockBytes = 20000, kStrideBytes = 20480;

const std::string kLanes = "lanes";  // Four connections over tcp.

Key key_of(std::uint32_t number) {
  Key key{};
  std::memcpy(key.data(), &number, sizeof number);
  return key;
}

// UCX is tested with the library that $BATON_UCX_LIBRARY names; see tests/contract for where to get it.
Options options_of(const std::string& backend, Faults faults) {
  Options options{.secret = "s", .backends = {backend}, .lease_ttl_s = 3, .faults = faults};
  options.limits.chunk_bytes = kBlockBytes;
  if (backend == kLanes) {
    options.backends = {"tcp"};
    options.streams = 2;
    options.lane_bytes = 1;
  }
  options.fabric.verbs_library = FAKE_VERBS;
  options.fabric.gpu_library = FAKE_GPU;
  if (const char* library = std::getenv("BATON_UCX_LIBRARY")) options.fabric.ucx_library = library;
  return options;
}

struct Node {
  explicit Node(const std::string& backend, Faults faults = {})
      : Node(options_of(backend, faults), backend == kLanes ? std::vector<std::string>{"127.0.0.2:0", "127.0.0.3:0"}
                                                            : std::vector<std::string>{"127.0.0.1:0"}) {}
  explicit Node(const Options& options, const std::vector<std::string>& listen = {"127.0.0.1:0"})
      : region(Region::create(kLayers * kBlocks * kStrideBytes)),
        memory(find_backend(options.backends.front())->device
                   ? std::make_unique<gpu::Memory>(std::make_shared<gpu::Device>(FAKE_GPU, 0), region->bytes())
                   : nullptr),
        agent(options, listen) {
    Pool pool{.block_bytes = kBlockBytes, .stride_bytes = kStrideBytes, .region = region};
    if (memory != nullptr) pool = {.block_bytes = kBlockBytes, .stride_bytes = kStrideBytes, .device = 0};
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) pool.layers.push_back(at(layer, 0));
    agent.set_pool({"model", kLayers, kBlocks, kBlockBytes, kBlockTokens}, pool);
  }
  std::uint8_t* at(std::uint32_t layer, std::uint32_t block) {
    auto* const base = memory == nullptr ? region->data() : reinterpret_cast<std::uint8_t*>(memory->address());
    return base + (layer * kBlocks + block) * kStrideBytes;
  }
  // A GPU's memory is none of the host's.
  void copy(void* to, const void* from) {
    if (memory == nullptr) {
      std::memcpy(to, from, kBlockBytes);
    } else {
      memory->device().copy(reinterpret_cast<std::uint64_t>(to), reinterpret_cast<std::uint64_t>(from), kBlockBytes);
    }
  }
  void fill(std::uint32_t block, std::uint8_t seed) {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      copy(at(layer, block), std::vector<std::uint8_t>(kBlockBytes, static_cast<std::uint8_t>(seed + layer)).data());
    }
  }
  bool holds(std::uint32_t block, std::uint8_t seed) {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      std::vector<std::uint8_t> bytes(kBlockBytes);
      copy(bytes.data(), at(layer, block));
      if (bytes != std::vector<std::uint8_t>(kBlockBytes, static_cast<std::uint8_t>(seed + layer))) return false;
    }
    return true;
  }

  // Returns the first report of one of two kinds for a key; keeps the others.
  Report wait(const Key& key, ReportKind kind, ReportKind or_kind) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (std::chrono::steady_clock::now() < end) {
      for (auto report = reports.begin(); report != reports.end(); ++report) {
        if (report->key != key || (report->kind != kind && report->kind != or_kind)) continue;
        const Report found = *report;
        reports.erase(report);
        return found;
      }
      pollfd waiting{agent.fileno(), POLLIN, 0};
      if (::poll(&waiting, 1, 100) != 1) continue;
      for (Report& report : agent.poll()) reports.push_back(std::move(report));
    }
    throw std::runtime_error("no report within 20 s");
  }
  Report wait_end(const Key& key) { return wait(key, ReportKind::pull_done, ReportKind::pull_failed); }
  Report wait_lease(const Key& key) { return wait(key, ReportKind::lease_released, ReportKind::lease_ended); }

  std::shared_ptr<Region> region;
  std::unique_ptr<gpu::Memory> memory;  // The pool, where it is in a GPU's memory.
  std::vector<Report> reports;
  Agent agent;
};

void offer(Node& source, std::uint32_t number, std::vector<std::uint32_t> blocks) {
  const Key key = key_of(number);
  const auto generation = source.agent.open_lease(key, -1);
  const auto tokens = static_cast<std::uint32_t>(blocks.size()) * kBlockTokens;
  source.agent.command(ExtendLease{key, generation, std::move(blocks)});
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    source.agent.command(PostReady{key, generation, static_cast<std::int32_t>(layer), tokens});
  }
}

// Two threads, one per side: requests come and go, some cancelled, some revoked.
void run_traffic(const std::string& backend) {
  Node source(backend), sink(backend);
  constexpr std::uint32_t kRequests = 60;
  std::atomic<std::uint32_t> begun = 0;
  std::string problem;
  std::thread prefill([&] {
    try {
      for (std::uint32_t number = 0; number < kRequests; ++number) {
        const std::uint32_t first = number % 16 * 4;
        if (number >= 16) source.wait_lease(key_of(number - 16));  // Its blocks are reused.
        source.fill(first, static_cast<std::uint8_t>(number));
        source.fill(first + 1, static_cast<std::uint8_t>(number + 100));
        offer(source, number, {first, first + 1});
        if (number % 7 == 3) source.agent.command(RevokeLease{key_of(number), true});
        begun = number + 1;
      }
      for (std::uint32_t number = kRequests - 16; number < kRequests; ++number) source.wait_lease(key_of(number));
    } catch (const std::exception& error) {
      problem = error.what();
    }
  });
  std::mt19937 random(3);
  std::uint32_t done = 0;
  for (std::uint32_t number = 0; number < kRequests; ++number) {
    const std::uint32_t first = number % 16 * 4 + 2;
    const Key key = key_of(number);
    sink.agent.command(StartPull{key, source.agent.endpoint(), 0, 2 * kBlockTokens, {first, first + 1}, 20});
    if (random() % 5 == 0) sink.agent.command(CancelPull{key});
    const Report end = sink.wait_end(key);
    // After the end nothing may write here: under the thread sanitizer a late write is a data race.
    if (end.kind == ReportKind::pull_done) {
      ++done;
      CHECK(sink.holds(first, static_cast<std::uint8_t>(number)));
      CHECK(sink.holds(first + 1, static_cast<std::uint8_t>(number + 100)));
    }
    sink.fill(first, 0);
    sink.fill(first + 1, 0);
  }
  prefill.join();
  if (!problem.empty()) throw std::runtime_error(problem);
  CHECK(done > kRequests / 3);
  const Stats left = source.agent.stats();
  CHECK(left.leases == 0 && left.leased_blocks == 0 && left.parked == 0 && sink.agent.stats().pulls == 0);
  CHECK(left.protocol_errors == 0 && sink.agent.stats().protocol_errors == 0);
}

void run_many_at_once(const std::string& backend) {
  Node source(backend, {.delay_s = 0.02}), sink(backend);
  std::vector<std::thread> callers;
  std::atomic<int> failed = 0;
  for (std::uint32_t number = 0; number < 16; ++number) {
    source.fill(number, static_cast<std::uint8_t>(number));
    callers.emplace_back([&, number] {
      try {
        sink.agent.command(StartPull{key_of(number), source.agent.endpoint(), 0, kBlockTokens, {63 - number}, 20});
        offer(source, number, {number});
        (void)source.agent.stats();
      } catch (const std::exception&) {
        ++failed;
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(failed == 0);
  for (std::uint32_t number = 0; number < 16; ++number) {
    CHECK(sink.wait_end(key_of(number)).kind == ReportKind::pull_done);
    CHECK(sink.holds(63 - number, static_cast<std::uint8_t>(number)));
  }
}

// Agents die in the middle of everything, over and over; nothing leaks and no agent hangs.
void run_sudden_ends(const std::string& backend) {
  for (std::uint32_t round = 0; round < 12; ++round) {
    Node source(backend), sink(backend);
    source.fill(0, 1);
    sink.agent.command(StartPull{key_of(1), source.agent.endpoint(), 0, kBlockTokens, {5}, 20});
    if (round % 3 > 0) offer(source, 1, {0});
    std::this_thread::sleep_for(std::chrono::microseconds(150 * round));
    (round % 2 == 0 ? source : sink).agent.close();
    const Report end = sink.wait_end(key_of(1));
    CHECK(end.kind == ReportKind::pull_failed || sink.holds(5, 1));
  }
}

// Takes connections and never says a word.
struct SilentListener {
  SilentListener() : listening(listen_on("127.0.0.1:0")) {}
  ~SilentListener() { ::close(listening.fd); }
  [[nodiscard]] std::string endpoint() const { return format_endpoint({{{listening.address}}, 7}); }
  Listening listening;
};

const baton::tests::FakeFolder kGpus("FAKE_GPU_DIR");

bool has_ucx() {
  return std::getenv("BATON_UCX_LIBRARY") != nullptr;
}

}  // namespace

TEST(traffic_over_cuda_ipc) {
  run_traffic("cuda-ipc");
}
TEST(traffic_over_cuda_put) {
  run_traffic("cuda-put");
}
TEST(traffic_over_gpudirect) {
  run_traffic("gpudirect");
}
TEST(many_callers_over_cuda_ipc) {
  run_many_at_once("cuda-ipc");
}
TEST(many_callers_over_cuda_put) {
  run_many_at_once("cuda-put");
}
TEST(many_callers_over_gpudirect) {
  run_many_at_once("gpudirect");
}
TEST(sudden_ends_over_cuda_ipc) {
  run_sudden_ends("cuda-ipc");
}
TEST(sudden_ends_over_cuda_put) {
  run_sudden_ends("cuda-put");
}
TEST(sudden_ends_over_gpudirect) {
  run_sudden_ends("gpudirect");
}
TEST(traffic_over_direct) {
  run_traffic("direct");
}
TEST(traffic_over_cma) {
  run_traffic("cma");
}
TEST(traffic_over_shared_memory) {
  run_traffic("shm");
}
TEST(traffic_over_tcp) {
  run_traffic("tcp");
}
TEST(traffic_over_verbs) {
  run_traffic("verbs");
}
TEST(traffic_over_ucx) {
  if (has_ucx()) run_traffic("ucx");
}
TEST(traffic_over_lanes) {
  run_traffic(kLanes);
}
TEST(many_callers_over_direct) {
  run_many_at_once("direct");
}
TEST(many_callers_over_cma) {
  run_many_at_once("cma");
}
TEST(many_callers_over_shared_memory) {
  run_many_at_once("shm");
}
TEST(many_callers_over_tcp) {
  run_many_at_once("tcp");
}
TEST(many_callers_over_verbs) {
  run_many_at_once("verbs");
}
TEST(many_callers_over_ucx) {
  if (has_ucx()) run_many_at_once("ucx");
}
TEST(many_callers_over_lanes) {
  run_many_at_once(kLanes);
}
TEST(sudden_ends_over_direct) {
  run_sudden_ends("direct");
}
TEST(sudden_ends_over_cma) {
  run_sudden_ends("cma");
}
TEST(sudden_ends_over_shared_memory) {
  run_sudden_ends("shm");
}
TEST(sudden_ends_over_tcp) {
  run_sudden_ends("tcp");
}
TEST(sudden_ends_over_verbs) {
  run_sudden_ends("verbs");
}
TEST(sudden_ends_over_ucx) {
  if (has_ucx()) run_sudden_ends("ucx");
}
TEST(sudden_ends_over_lanes) {
  run_sudden_ends(kLanes);
}

TEST(agents_wake_for_deadlines) {
  Node source("tcp"), sink("tcp");
  sink.agent.command(StartPull{key_of(1), source.agent.endpoint(), 0, kBlockTokens, {5}, 0.3});
  CHECK(sink.wait_end(key_of(1)).cause == Cause::deadline);
}

// A command that causes nothing at once may still bring the next alarm forward.
TEST(agents_wake_for_alarms_that_a_command_sets) {
  const SilentListener silent;
  Options options = options_of("tcp", {});
  options.connect_timeout_s = options.wanted_timeout_s = 60;
  Node sink(options);
  sink.agent.command(StartPull{key_of(1), silent.endpoint(), 0, kBlockTokens, {4}, 60});
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // It has nothing to do now for ten seconds.
  const auto began = std::chrono::steady_clock::now();
  sink.agent.command(StartPull{key_of(2), silent.endpoint(), 0, kBlockTokens, {5}, 0.1});
  CHECK(sink.wait_end(key_of(2)).cause == Cause::deadline);
  CHECK(std::chrono::steady_clock::now() < began + std::chrono::seconds(5));
}

// A post sets no alarm: if its wake-up is lost, nothing tells the sink before the next keep-alive, a second later.
TEST(agents_tell_every_post_at_once) {
  constexpr std::uint32_t kPulls = 30;
  Node source("tcp"), sink("tcp");
  source.fill(0, 1);
  const auto began = std::chrono::steady_clock::now();
  for (std::uint32_t number = 0; number < kPulls; ++number) {
    const auto generation = source.agent.open_lease(key_of(number), -1);
    source.agent.command(ExtendLease{key_of(number), generation, {0}});
    sink.agent.command(StartPull{key_of(number), source.agent.endpoint(), 0, kBlockTokens, {5}, 20});
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // Both sides come to rest.
    source.agent.command(PostReady{key_of(number), generation, -1, kBlockTokens});
    CHECK(sink.wait_end(key_of(number)).kind == ReportKind::pull_done);
  }
  CHECK(std::chrono::steady_clock::now() < began + std::chrono::seconds(kPulls / 2));
}

TEST(agents_take_the_next_way_when_a_proof_does_not_come) {
  Options options = options_of("verbs", {});
  options.backends.emplace_back("tcp");
  Node source(options), sink(options);
  source.fill(0, 1);
  offer(source, 1, {0});
  baton::tests::kAdapters.hold(1);
  sink.agent.command(StartPull{key_of(1), source.agent.endpoint(), 0, kBlockTokens, {5}, 20});
  const Report end = sink.wait_end(key_of(1));
  baton::tests::kAdapters.hold(0);
  CHECK(end.kind == ReportKind::pull_done && end.backend == "tcp" && sink.holds(5, 1));
  CHECK(end.declined.starts_with("verbs: its proof takes too long"));
}

namespace {

// Starts a pull into block 5, of which the adapter holds the reads back.
void hold_a_pull(Node& source, Node& sink) {
  for (const std::uint32_t block : {0, 1}) source.fill(block, 1);
  offer(source, 1, {0});
  sink.agent.command(StartPull{key_of(1), source.agent.endpoint(), 0, kBlockTokens, {4}, 20});
  CHECK(sink.wait_end(key_of(1)).kind == ReportKind::pull_done);  // The connection stands.
  baton::tests::kAdapters.hold(1);
  offer(source, 2, {1});
  sink.agent.command(StartPull{key_of(2), source.agent.endpoint(), 0, kBlockTokens, {5}, 20});
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // Its reads are under way.
}

}  // namespace

// A pull's end is reported only after the adapter's writes have ended, by force if need be.
TEST(agents_tell_an_end_once_adapters_write_no_more) {
  Node source("verbs"), sink("verbs");
  hold_a_pull(source, sink);
  sink.agent.command(CancelPull{key_of(2)});
  CHECK(sink.wait_end(key_of(2)).cause == Cause::cancelled);
  sink.fill(5, 9);
  baton::tests::kAdapters.hold(0);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK(sink.holds(5, 9));
}

// The memory may be freed once `close` has returned, whoever called it first.
TEST(agents_that_are_closed_twice_at_once_write_no_more) {
  Node source("verbs"), sink("verbs");
  hold_a_pull(source, sink);
  std::thread first([&] { sink.agent.close(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  sink.agent.close();
  sink.fill(5, 9);
  baton::tests::kAdapters.hold(0);
  first.join();
  CHECK(sink.holds(5, 9));
}

namespace {

// The highest descriptor that is an epoll instance: that of the agent made last.
int newest_epoll() {
  int newest = -1;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const bool is_one = std::filesystem::read_symlink(entry, gone) == "anon_inode:[eventpoll]";
    if (is_one) newest = std::max(newest, std::stoi(entry.path().filename()));
  }
  return newest;
}

bool is_readable(int fd) {
  pollfd waiting{fd, POLLIN, 0};
  return ::poll(&waiting, 1, 0) == 1;
}

}  // namespace

// Whoever polls when the descriptor says so gets what was reported before, and then the failure.
TEST(agents_tell_a_failure_after_the_reports_before_it) {
  Node node("tcp");
  node.agent.open_lease(key_of(1), -1);
  node.agent.command(RevokeLease{key_of(1), true});
  const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  CHECK(::dup2(nothing, newest_epoll()) >= 0);
  ::close(nothing);
  bool failed = false;
  for (int tries = 0; tries < 1000 && !failed; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    try {
      node.agent.open_lease(key_of(2), -1);  // Wakes the thread.
      node.agent.command(RevokeLease{key_of(2), false});
    } catch (const std::invalid_argument&) {
    } catch (const std::runtime_error&) {
      failed = true;
    }
  }
  CHECK(failed && is_readable(node.agent.fileno()));
  CHECK(node.agent.poll().size() == 1);
  CHECK(is_readable(node.agent.fileno()));
  try {
    (void)node.agent.poll();
    CHECK(!"a failure that is not told");
  } catch (const std::runtime_error& error) {
    CHECK(std::string(error.what()).starts_with("the transfer agent failed"));
  }
}
