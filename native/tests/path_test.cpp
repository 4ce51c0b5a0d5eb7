// Data paths by themselves: chunks arrive where they belong and touch nothing else, and what a peer makes up is
// refused.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "hash/crc32c.h"
#include "tests/check.h"
#include "tests/path_end.h"
#include "transfer/one_sided.h"

using namespace baton::transfer;
using baton::tests::PathEnd;
using baton::tests::proof_of;
using baton::tests::work;

namespace {

using Blocks = std::vector<std::uint32_t>;

constexpr std::uint8_t kUntouched = 0xEE;
const Backend* const kPaths[] = {&kDirect, &kRing, &kCma, &kVerbs};

std::uint8_t byte_of(std::uint32_t layer, std::uint32_t block, std::uint64_t at) {
  return static_cast<std::uint8_t>(7 * layer + 31 * block + at);
}

// Two ends that have agreed on a way.
struct Pair {
  explicit Pair(const Backend& backend, bool checksum = true, std::uint64_t source_stride = PathEnd::kBlockBytes,
                std::uint64_t sink_stride = 128, const std::string& device = "fake_0")
      : source(source_stride, device), sink(sink_stride, device) {
    std::string why;
    serving = backend.at_source(source.site(), why);
    CHECK(serving);
    placing = backend.at_sink(sink.site(), serving->offer(), why);
    CHECK(placing);
    while (true) {
      CHECK(serving->check(proof_of(*placing)));
      if (!serving->has_more_to_offer()) break;
      CHECK(placing->resume(serving->offer()));
    }
    serving->use(checksum);
    placing->use(checksum);
    std::memset(sink.region->data(), kUntouched, sink.region->bytes());
    for (std::uint32_t layer = 0; layer < PathEnd::kLayers; ++layer) {
      for (std::uint32_t block = 0; block < PathEnd::kBlocks; ++block) {
        std::uint8_t* begin = source.pool.layers[layer] + block * source_stride;
        for (std::uint64_t at = 0; at < PathEnd::kBlockBytes; ++at) begin[at] = byte_of(layer, block, at);
      }
    }
  }
  // The source's announcement of a chunk: its place, and its sum.
  Place serve(PullId pull, std::uint32_t layer, const Blocks& from, const Blocks& to,
              Corruption corruption = Corruption::none, bool before_checksum = false) {
    const std::size_t before = source.happened.size();
    serving->serve({.connection = 1,
                    .pull = pull,
                    .layer = layer,
                    .blocks = from,
                    .corruption = corruption,
                    .before_checksum = before_checksum});
    CHECK(work(*serving, [&] { return source.happened.size() > before; }));
    Place chunk{.connection = 1, .pull = pull, .layer = layer, .blocks = to};
    if (const auto* served = std::get_if<Served>(&source.happened.back())) {
      chunk.slot = served->slot;
      crc = served->crc;
    } else {
      chunk.where = std::get<Granted>(source.happened.back()).where;
      crc = std::get<Granted>(source.happened.back()).crc;
    }
    return chunk;
  }
  std::uint32_t place(const Place& chunk) {
    const std::size_t before = sink.happened.size();
    CHECK(placing->place(chunk));
    CHECK(work(*placing, [&] { return sink.happened.size() > before; }));
    return std::get<Placed>(sink.happened.back()).crc;
  }
  bool refuses(const Place& chunk) {
    const std::size_t before = sink.happened.size();
    return !placing->place(chunk) || !work(*placing, [&] { return sink.happened.size() > before; });
  }
  // Every byte of the sink's region is untouched, or of a block that `to` names, and then of the one in `from`.
  void check(std::uint32_t layer, const Blocks& from, const Blocks& to) {
    std::vector<std::uint8_t> expected(sink.region->bytes(), kUntouched);
    for (std::size_t i = 0; i < to.size(); ++i) {
      const std::size_t begin = sink.pool.layers[layer] - sink.region->data() + to[i] * sink.pool.stride_bytes;
      for (std::uint64_t at = 0; at < PathEnd::kBlockBytes; ++at) expected[begin + at] = byte_of(layer, from[i], at);
    }
    CHECK(std::memcmp(expected.data(), sink.region->data(), expected.size()) == 0);
  }

  PathEnd source, sink;
  std::unique_ptr<DataPath> serving, placing;
  std::uint32_t crc = 0;
};

std::uint32_t sum_of(std::uint32_t layer, const Blocks& blocks) {
  Blob bytes;
  for (const std::uint32_t block : blocks) {
    for (std::uint64_t at = 0; at < PathEnd::kBlockBytes; ++at) bytes.push_back(byte_of(layer, block, at));
  }
  return baton::crc32c_portable(0, bytes.data(), bytes.size());
}

template <class T>
Blob with(Blob offer, std::size_t at, T value) {
  std::memcpy(offer.data() + at, &value, sizeof value);
  return offer;
}

bool is_refused(const Backend& backend, const Blob& offer) {
  PathEnd sink;
  std::string why;
  return backend.at_sink(sink.site(), offer, why) == nullptr && !why.empty();
}

Blob honest_offer(const Backend& backend, PathEnd& source, std::unique_ptr<DataPath>& path) {
  std::string why;
  path = backend.at_source(source.site(), why);
  return path->offer();
}

// An adapter whose reads end when the test says so, and which begins so many pieces at a time.
class ManualSink : public ReadingSink {
 public:
  explicit ManualSink(PathEnd& end, std::size_t room = 8)
      : ReadingSink(end.site(), RemotePool::of(end.pool)), room_(room) {}
  Turn end(std::size_t pieces) {
    ending_ = pieces;
    return advance();
  }

 protected:
  bool poll() override {
    if (ending_ > 0) ended(*reading_, std::exchange(ending_, 0));
    return true;
  }
  bool begin(Read& read) override {
    reading_ = &read;
    read.begun = std::min(read.begun + room_, read.pieces.local.size());
    return true;
  }

 private:
  std::size_t room_;
  Read* reading_ = nullptr;
  std::size_t ending_ = 0;
};

}  // namespace

TEST(paths_move_what_they_are_given_and_nothing_else) {
  // Neighbours on both sides, on the sink's only, on the source's only.
  const Blocks from = {4, 5, 9, 10}, to = {7, 8, 9, 3};
  for (const Backend* backend : kPaths) {
    for (const auto& [source_stride, sink_stride] : {std::pair(96u, 96u), {96u, 128u}, {160u, 96u}}) {
      for (const bool checksum : {true, false}) {
        Pair pair(*backend, checksum, source_stride, sink_stride);
        const Place chunk = pair.serve(1, 1, from, to);
        const std::uint32_t expected = checksum ? sum_of(1, from) : 0;
        CHECK(pair.crc == expected && pair.place(chunk) == expected);
        pair.check(1, from, to);
      }
    }
    for (const Corruption corruption : {Corruption::flip, Corruption::zero, Corruption::shift}) {
      for (const bool before : {false, true}) {
        Pair corrupting(*backend);
        const Place chunk = corrupting.serve(1, 0, from, to, corruption, before);
        CHECK((corrupting.place(chunk) == corrupting.crc) == (before && backend == &kRing));
      }
    }
  }
}

TEST(paths_write_nothing_of_a_pull_that_was_stopped) {
  for (const Backend* backend : kPaths) {
    Pair pair(*backend);
    const Place stopped = pair.serve(1, 0, {1, 2}, {3, 4}), other = pair.serve(2, 0, {5}, {6});
    CHECK(pair.placing->place(stopped));
    pair.placing->stop_placing(1);
    CHECK(!pair.placing->places(1));
    const std::size_t freed = pair.sink.happened.size();
    CHECK(stopped.slot < 0 || (freed == 1 && std::get<Placed>(pair.sink.happened[0]).slot == stopped.slot));
    CHECK(pair.place(other) == sum_of(0, {5}));
    pair.check(0, {5}, {6});

    pair.serving->serve({.connection = 1, .pull = 1, .blocks = {1}});
    pair.serving->serve({.connection = 1, .pull = 2, .sequence = 9, .blocks = {1}});
    pair.serving->stop_serving(1);
    const std::size_t before = pair.source.happened.size();
    CHECK(work(*pair.serving, [&] { return pair.source.happened.size() > before; }));
    CHECK(pair.serving->advance() == DataPath::Turn::idle && pair.source.happened.size() == before + 1);
  }
}

TEST(paths_refuse_what_no_source_grants) {
  for (const Backend* backend : {&kDirect, &kCma, &kVerbs}) {
    Pair pair(*backend);
    const Place good = pair.serve(1, 0, {1, 2}, {3, 4});
    Place outside = good, short_of = good;
    outside.where = with(outside.where, 4, std::uint32_t{PathEnd::kBlocks});
    short_of.where.resize(4);
    CHECK(pair.refuses(short_of));
    CHECK(Pair(*backend).refuses(outside));
    pair.check(0, {}, {});
  }
  for (const std::int32_t slot : {-1, 64}) {
    Pair pair(kRing);
    Place chunk = pair.serve(1, 0, {1}, {3});
    chunk.slot = slot;
    CHECK(pair.refuses(chunk));
  }
}

TEST(paths_of_a_ring_use_a_slot_again_once_it_was_credited) {
  Pair pair(kRing);
  for (std::uint32_t sequence = 0; sequence < 65; ++sequence) {
    pair.serving->serve({.connection = 1, .pull = 1, .sequence = sequence, .blocks = {1}});
  }
  while (pair.serving->advance() == DataPath::Turn::more) continue;
  std::set<std::int32_t> slots;
  for (const Event& event : pair.source.happened) slots.insert(std::get<Served>(event).slot);
  CHECK(pair.source.happened.size() == 64 && slots.size() == 64 && *slots.begin() == 0 && *slots.rbegin() == 63);
  CHECK(!pair.serving->credit(-1) && !pair.serving->credit(64));
  CHECK(pair.serving->credit(3) && !pair.serving->credit(3));
  while (pair.serving->advance() == DataPath::Turn::more) continue;
  CHECK(pair.source.happened.size() == 65 && std::get<Served>(pair.source.happened.back()).slot == 3);
}

TEST(paths_of_a_ring_leave_nothing_behind) {
  PathEnd source;
  std::unique_ptr<DataPath> path;
  const auto file_of = [](const Blob& offer) {
    std::string name;
    Reader(offer).get(name);
    return std::filesystem::path("/dev/shm" + name);
  };
  const auto abandoned = file_of(honest_offer(kRing, source, path));
  CHECK(std::filesystem::exists(abandoned));
  const auto agreed = file_of(honest_offer(kRing, source, path));
  CHECK(!std::filesystem::exists(abandoned));
  CHECK(!path->check(Blob(32)) && !std::filesystem::exists(agreed));
}

TEST(paths_refuse_offers_of_nothing) {
  PathEnd source;
  std::unique_ptr<DataPath> path;
  const Blob direct = honest_offer(kDirect, source, path);  // pid, fd, bytes, stride, blocks, layers, …
  CHECK(!is_refused(kDirect, direct));
  CHECK(is_refused(kDirect, with(direct, 24, std::uint32_t{PathEnd::kBlocks + 1})));
  CHECK(is_refused(kDirect, with(direct, 40, source.region->bytes() - 1)));
  CHECK(is_refused(kDirect, with(direct, 16, std::uint64_t{1} << 63)));
  CHECK(is_refused(kDirect, with(direct, 16, PathEnd::kBlockBytes - 1)));
  CHECK(is_refused(kDirect, with(direct, 8, source.region->bytes() + 4096)));
  // A file that may shrink under the reader.
  const int unsealed = ::memfd_create("test", MFD_CLOEXEC);
  CHECK(::ftruncate(unsealed, static_cast<off_t>(Region::kHeaderBytes + source.region->bytes())) == 0);
  CHECK(is_refused(kDirect, with(direct, 4, unsealed)));
  ::close(unsealed);
  CHECK(!path->check(Blob(32)));

  const Blob cma = honest_offer(kCma, source, path);  // pid, the token's address, …
  CHECK(!is_refused(kCma, cma));
  CHECK(is_refused(kCma, with(cma, 0, std::int32_t{0})) && is_refused(kCma, with(cma, 4, std::uint64_t{0})));
  CHECK(!path->check(Blob(32)));

  const Blob ring = honest_offer(kRing, source, path);  // name, slots, bytes of a slot
  CHECK(!is_refused(kRing, ring));
  // Shared memory that is there, and none of ours.
  for (std::string name : {"/caton-" + std::string(32, 'a'), "/baton-" + std::string(32, 'z')}) {
    const int fd = ::shm_open(name.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    CHECK(::ftruncate(fd, static_cast<off_t>(4096 + 64 * PathEnd::kChunkBytes)) == 0);
    Blob other = ring;
    std::copy(name.begin(), name.end(), other.begin() + 2);
    const bool refused = is_refused(kRing, other);
    ::shm_unlink(name.c_str());
    ::close(fd);
    CHECK(refused);
  }
  CHECK(is_refused(kRing, with(ring, 41, std::uint32_t{63})) && is_refused(kRing, with(ring, 41, std::uint32_t{65})));
  CHECK(is_refused(kRing, with(ring, 45, PathEnd::kChunkBytes + 1)));

  const Blob verbs = honest_offer(kVerbs, source, path);
  CHECK(!is_refused(kVerbs, verbs));
  for (const auto& [backend, offer] : {std::pair(&kDirect, direct), {&kCma, cma}, {&kRing, ring}, {&kVerbs, verbs}}) {
    Blob longer = offer, shorter = offer;
    longer.push_back(0);
    shorter.pop_back();
    CHECK(is_refused(*backend, longer) && is_refused(*backend, shorter) && is_refused(*backend, {}));
  }
}

TEST(paths_read_more_pieces_than_a_queue_has_room_for) {
  Pair pair(kVerbs, true, 96, 128, "fake_1");  // Its queues hold eight.
  const Blocks from = {0, 2, 4, 6, 8, 10, 12, 14, 1, 3}, to = {15, 13, 11, 9, 7, 5, 3, 1, 0, 2};
  CHECK(pair.place(pair.serve(1, 0, from, to)) == sum_of(0, from));
  pair.check(0, from, to);
}

TEST(paths_wait_for_pieces_that_there_was_no_room_for) {
  PathEnd end;
  ManualSink path(end, 2);
  Place chunk{.connection = 1, .pull = 1, .blocks = {1, 3, 5}};
  Writer writer(chunk.where);
  for (const std::uint32_t block : {2u, 4u, 6u}) writer.put(block);
  CHECK(path.place(chunk) && path.end(0) == DataPath::Turn::idle);
  path.end(2);
  CHECK(path.places(1) && end.happened.empty());
  path.end(1);
  CHECK(!path.places(1) && end.happened.size() == 1);
}

TEST(paths_wait_for_every_piece_of_a_read) {
  PathEnd end;
  ManualSink path(end);
  Place chunk{.connection = 1, .pull = 1, .blocks = {1, 3, 5}};
  Writer writer(chunk.where);
  for (const std::uint32_t block : {2u, 4u, 6u}) writer.put(block);
  CHECK(path.place(chunk) && path.end(0) == DataPath::Turn::idle && path.places(1));
  CHECK(path.end(2) == DataPath::Turn::idle && path.places(1) && end.happened.empty());
  CHECK(path.end(1) == DataPath::Turn::idle && !path.places(1) && end.happened.size() == 1);
  chunk.pull = 2;
  CHECK(path.place(chunk) && path.end(0) == DataPath::Turn::idle);
  path.stop_placing(2);
  CHECK(path.places(2) && path.end(2) == DataPath::Turn::idle && path.places(2));
  CHECK(path.end(1) == DataPath::Turn::idle && !path.places(2) && end.happened.size() == 1);
}
