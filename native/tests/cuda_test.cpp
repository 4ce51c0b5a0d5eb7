// CUDA memory and peers that lie: whatever they say, no kernel of ours goes where nothing is, which the stand-in for
// GPUs aborts on. And the parts by themselves: gates, signals, sums.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <functional>
#include <random>

#include "gpu/sum.h"
#include "tests/check.h"
#include "tests/fake_adapters.h"
#include "transfer/cuda_path.h"
#include "transfer/tcp.h"
#include "transfer/wire.h"

using namespace baton::transfer;
namespace gpu = baton::gpu;

namespace {

constexpr std::uint32_t kLayers = 3, kBlocks = 8;
constexpr std::uint64_t kBlockBytes = 96, kChunkBytes = 3 * kBlockBytes;
constexpr std::size_t kHandleBytes = sizeof(BatonGpuHandle);

// One side: a pool in two allocations, and a stream that goes nowhere.
struct Side {
  std::shared_ptr<gpu::Device> device = std::make_shared<gpu::Device>(FAKE_GPU, 0);
  gpu::Memory first{device, 2 * kBlocks * kBlockBytes};
  gpu::Memory second{device, kBlocks * kBlockBytes};
  Pool pool{.block_bytes = kBlockBytes, .stride_bytes = kBlockBytes, .blocks = kBlocks, .device = 0};
  std::vector<Event> happened;
  Fabrics fabrics;
  Stream stream{::socket(AF_UNIX, SOCK_STREAM, 0), 1, happened};

  Side() {
    const std::uint64_t layer_bytes = kBlocks * kBlockBytes;
    for (const std::uint64_t at : {first.address(), first.address() + layer_bytes, second.address()}) {
      pool.layers.push_back(reinterpret_cast<std::uint8_t*>(at));
    }
    kGpuDirect.prepare({.verbs_library = FAKE_VERBS, .gpu_library = FAKE_GPU}, pool, fabrics);
  }
  Site site() { return {1, stream, pool, kChunkBytes, happened, fabrics}; }
};

// After a lie nothing more may happen, so a few milliseconds are enough.
void settle(DataPath& path, const std::function<bool()>& done, int turns_max = 2000) {
  for (int turns = 0; turns < turns_max && !done(); ++turns) {
    if (path.advance() == DataPath::Turn::broken) return;
    pollfd waiting{path.fd(), POLLIN, 0};
    ::poll(&waiting, 1, 1);
  }
}

// Up to three bytes other, one less or one more; `from`: what comes before is left alone.
void change(Blob& bytes, std::mt19937& random, std::size_t from) {
  for (std::uint32_t changes = random() % 4; changes > 0 && bytes.size() > from; --changes) {
    std::uint8_t& byte = bytes[from + random() % (bytes.size() - from)];
    byte = random() % 2 == 0 ? static_cast<std::uint8_t>(random()) : static_cast<std::uint8_t>(byte + 1);
  }
  if (random() % 16 == 0) bytes.push_back(0);
  if (random() % 16 == 0 && !bytes.empty()) bytes.pop_back();
}

Place chunk_of(std::mt19937& random) {
  Place chunk{.connection = 1, .pull = 1, .layer = static_cast<std::uint32_t>(random() % kLayers)};
  for (std::uint32_t count = 1 + random() % 3; count > 0; --count) chunk.blocks.push_back(random() % kBlocks);
  return chunk;
}

}  // namespace

TEST(offers_and_grants_that_lie_read_nothing_else_over_cuda_ipc) {
  Side source, sink;
  std::string why;
  const auto offering = kCudaIpc.at_source(source.site(), why);
  CHECK(offering != nullptr);
  const Blob honest = offering->offer();
  // Handles are CUDA's own matter; everything behind the last of the three can be a lie, and so can their number.
  const std::size_t lies = kHandleBytes + sizeof(std::uint32_t) + 2 * kHandleBytes;
  std::mt19937 random(5);
  std::uint32_t accepted = 0, placed = 0;
  for (int round = 0; round < 600; ++round) {
    Blob offer = honest;
    if (round > 0) change(offer, random, lies);
    if (round % 50 == 49) offer[kHandleBytes] = static_cast<std::uint8_t>(random() % 5);
    const auto path = kCudaIpc.at_sink(sink.site(), offer, why);
    CHECK(path != nullptr || !why.empty());
    if (path == nullptr) continue;
    ++accepted;
    settle(*path, [&] { return path->proof().has_value(); });
    CHECK(offering->check(path->proof().value()));
    path->use(true);
    sink.happened.clear();
    Place chunk = chunk_of(random);
    Writer writer(chunk.where);
    for (std::size_t i = 0; i < chunk.blocks.size(); ++i) writer.put(static_cast<std::uint32_t>(random() % kBlocks));
    CudaGrant{}.put(writer);
    if (round > 0) change(chunk.where, random, 0);
    if (!path->place(chunk)) continue;
    settle(*path, [&] { return !sink.happened.empty(); }, 10);
    placed += sink.happened.size();
  }
  CHECK(accepted > 50 && placed > 20);
}

TEST(windows_and_slots_that_lie_are_not_written_over_cuda_put) {
  Side source, sink;
  std::string why;
  std::mt19937 random(6);
  std::uint32_t accepted = 0, served = 0;
  for (int round = 0; round < 200; ++round) {
    const auto path = kCudaPut.at_source(source.site(), why);
    const auto taking = kCudaPut.at_sink(sink.site(), path->offer(), why);
    CHECK(path != nullptr && taking != nullptr);
    Blob answer = taking->proof().value();
    if (round > 0) change(answer, random, kHandleBytes);
    if (round % 4 == 1) answer.at(kHandleBytes + sizeof(std::uint32_t)) += 16;  // Larger slots than there are.
    if (!path->check(answer) || !path->has_more_to_offer()) continue;
    ++accepted;
    CHECK(taking->resume({}) && !taking->resume({}));
    settle(*taking, [&] { return taking->proof().has_value(); });
    CHECK(path->check(taking->proof().value()));
    path->use(true);
    taking->use(true);
    source.happened.clear();
    // Fill every slot.
    for (std::uint32_t i = 0; i < 64; ++i) path->serve({.connection = 1, .pull = 1, .sequence = i, .blocks = {1, 5}});
    settle(*path, [&] { return source.happened.size() == 64; }, 100);
    if (source.happened.empty()) continue;
    ++served;
    const auto chunk = std::get<Served>(source.happened.at(0));
    CHECK(path->credit(chunk.slot) && !path->credit(chunk.slot) && !path->credit(-1) && !path->credit(1 << 20));
    sink.happened.clear();
    Place place{.connection = 1, .pull = 1, .slot = chunk.slot, .layer = 0, .blocks = {2, 3}};
    if (round % 4 == 3) place.slot = static_cast<std::int32_t>(random());
    if (!taking->place(place)) continue;
    settle(*taking, [&] { return !sink.happened.empty(); }, 10);
  }
  CHECK(accepted > 20 && served > 20);
}

TEST(offers_and_grants_that_lie_read_nothing_else_over_gpudirect) {
  Side source, sink;
  std::string why;
  std::mt19937 random(7);
  std::uint32_t proven = 0, placed = 0;
  for (int round = 0; round < 400; ++round) {
    const auto offering = kGpuDirect.at_source(source.site(), why);
    CHECK(offering != nullptr);
    Blob offer = offering->offer();
    if (round > 0) change(offer, random, 0);
    const auto path = kGpuDirect.at_sink(sink.site(), offer, why);
    CHECK(path != nullptr || !why.empty());
    if (path == nullptr || !offering->check(path->proof().value())) continue;
    CHECK(path->resume({}) && !path->resume({}));
    settle(*path, [&] { return path->proof().has_value(); });
    if (!path->proof() || !offering->check(*path->proof())) continue;
    ++proven;
    path->use(true);
    sink.happened.clear();
    Place chunk = chunk_of(random);
    Writer writer(chunk.where);
    for (std::size_t i = 0; i < chunk.blocks.size(); ++i) writer.put(static_cast<std::uint32_t>(random() % kBlocks));
    if (round > 0) change(chunk.where, random, 0);
    if (!path->place(chunk)) continue;
    settle(*path, [&] { return !sink.happened.empty(); });
    placed += sink.happened.size();
  }
  CHECK(proven > 50 && placed > 20);
}

TEST(connections_that_are_proven_hold_no_place_for_a_proof_over_gpudirect) {
  Side source, sink;
  std::string why;
  std::vector<std::unique_ptr<DataPath>> open;
  for (std::uint32_t i = 0; i <= CudaPool::kLandings; ++i) {
    auto offering = kGpuDirect.at_source(source.site(), why);
    auto path = kGpuDirect.at_sink(sink.site(), offering->offer(), why);
    CHECK(path != nullptr && offering->check(path->proof().value()) && path->resume({}));
    settle(*path, [&] { return path->proof().has_value(); });
    CHECK(offering->check(path->proof().value()));
    open.push_back(std::move(offering));
    open.push_back(std::move(path));
  }
}

TEST(what_an_adapter_wrote_is_seen_once_its_connection_is_closed_over_gpudirect) {
  Side source, sink;
  std::string why;
  const auto offering = kGpuDirect.at_source(source.site(), why);
  auto path = kGpuDirect.at_sink(sink.site(), offering->offer(), why);
  CHECK(offering->check(path->proof().value()) && path->resume({}));
  settle(*path, [&] { return path->proof().has_value(); });
  CHECK(offering->check(path->proof().value()));
  path->use(true);
  CHECK(path->place({.connection = 1, .pull = 1, .layer = 0, .blocks = {2}, .where = where_of({.blocks = {3}})}));
  CHECK(path->advance() != DataPath::Turn::broken);
  for (int tries = 0; baton::tests::kAdapters.unflushed() == 0 && tries < 5000; ++tries) ::usleep(1000);
  CHECK(baton::tests::kAdapters.unflushed() == 1);
  path.reset();
  CHECK(baton::tests::kAdapters.unflushed() == 0);
}

TEST(a_source_that_ends_a_pull_makes_what_was_granted_stale) {
  Side source, sink;
  std::string why;
  const auto path = kCudaIpc.at_source(source.site(), why);
  const auto taking = kCudaIpc.at_sink(sink.site(), path->offer(), why);
  path->use(true);
  taking->use(true);
  path->serve({.connection = 1, .pull = 7, .layer = 1, .blocks = {3}});
  settle(*path, [&] { return !source.happened.empty(); });
  const auto granted = std::get<Granted>(source.happened.at(0));
  const Place chunk{.connection = 1, .pull = 7, .layer = 1, .blocks = {4}, .where = granted.where};
  sink.first.device().fill(sink.first.address(), 9, sink.first.bytes());
  CHECK(taking->place(chunk));
  settle(*taking, [&] { return !sink.happened.empty(); });
  CHECK(std::get<Placed>(sink.happened.at(0)).crc == granted.crc);
  // The same once more, after the source has stopped to serve that pull.
  path->stop_serving(7);
  sink.happened.clear();
  sink.first.device().fill(sink.first.address(), 9, sink.first.bytes());
  CHECK(taking->place(chunk));
  settle(*taking, [&] { return !sink.happened.empty(); }, 50);
  CHECK(sink.happened.empty() && !taking->places(7));
  std::vector<std::uint8_t> bytes(sink.first.bytes());
  sink.first.device().copy(reinterpret_cast<std::uint64_t>(bytes.data()), sink.first.address(), bytes.size());
  CHECK(bytes == std::vector<std::uint8_t>(bytes.size(), 9));
}

TEST(sums_tell_order_place_and_single_bits) {
  std::mt19937 random(4);
  std::vector<std::uint32_t> words(1024);
  for (std::uint32_t& word : words) word = random();
  const auto sum = [&] {
    std::uint64_t all = 0;
    for (std::size_t i = 0; i < words.size(); i += 4) {
      all += gpu::sum_of(words[i], words[i + 1], words[i + 2], words[i + 3], i / 4);
    }
    return gpu::fold(all);
  };
  const std::uint32_t before = sum();
  for (std::size_t bit = 0; bit < words.size() * 32; bit += 7) {
    words[bit / 32] ^= 1U << bit % 32;
    CHECK(sum() != before);
    words[bit / 32] ^= 1U << bit % 32;
  }
  for (std::size_t i = 4; i < words.size(); ++i) {
    std::swap(words[i], words[i - 4]);
    CHECK(sum() != before);
    std::swap(words[i], words[i - 4]);
  }
  const std::vector<std::uint32_t> kept = words;
  std::ranges::fill(words, 0);
  const std::uint32_t zeros = sum();
  words[500] = 1;
  CHECK(sum() != zeros);
}

TEST(a_library_that_is_not_ours_is_not_used) {
  for (const char* library : {"/nowhere/libbaton_gpu.so", "libm.so.6"}) {
    try {
      const gpu::Device device(library, 0);
      CHECK(false);
    } catch (const gpu::Unavailable&) {
    }
  }
}
