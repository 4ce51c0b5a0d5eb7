// What backends take from a peer: offers and grants on the sink's side, proofs and credits on the source's.
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

#include "fuzz/input.h"
#include "transfer/region.h"
#include "transfer/tcp.h"

using namespace baton::fuzz;

namespace {

constexpr std::uint32_t kLayers = 2, kBlocks = 8;
constexpr std::uint64_t kBlockBytes = 96, kChunkBytes = 3 * kBlockBytes;

// One side: a pool in a region, and a stream that goes nowhere.
struct Side {
  std::shared_ptr<Region> region = Region::create(kLayers * kBlocks * kBlockBytes);
  Pool pool{.block_bytes = kBlockBytes, .stride_bytes = kBlockBytes, .blocks = kBlocks, .region = region};
  std::vector<Event> happened;
  Fabrics fabrics;
  Stream stream{::socket(AF_UNIX, SOCK_STREAM, 0), 1, happened};
  Side() {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      pool.layers.push_back(region->data() + layer * kBlocks * kBlockBytes);
    }
  }
  Site site() { return {1, stream, pool, kChunkBytes, happened, fabrics}; }
};

// RDMA and UCX need an adapter to begin with.
std::vector<const Backend*> without_libraries() {
  std::vector<const Backend*> found(backends().begin(), backends().end());
  std::erase_if(found, [](const Backend* backend) { return backend->prepare != nullptr; });
  return found;
}

// The honest bytes, but for what the input changes.
Blob changed(Blob honest, Input& input) {
  if (input.byte() % 8 == 0) return input.blob(input.byte());
  for (std::uint8_t changes = input.byte() % 4; changes > 0; --changes) {
    const std::size_t at = input.byte();
    const std::uint8_t value = input.byte();
    if (at < honest.size()) honest[at] = value;
    if (at == 255) honest.push_back(value);
    if (at == 254 && !honest.empty()) honest.pop_back();
  }
  return honest;
}

// Other processes of this machine are none of a test's business.
void name_own_process(Blob& offer) {
  const std::int32_t own = ::getpid();
  std::int32_t pid = 0;
  if (offer.size() < sizeof pid) return;
  std::memcpy(&pid, offer.data(), sizeof pid);
  if (pid > 0) std::memcpy(offer.data(), &own, sizeof own);
}

void try_sink(DataPath& path, Input& input, Side& here) {
  path.use(true);
  for (int chunks = 0; chunks < 8 && !input.empty(); ++chunks) {
    const std::uint32_t count = 1 + input.byte() % 3;
    Place chunk{.connection = 1, .pull = input.byte() % 2u, .slot = -1, .layer = input.byte() % kLayers};
    input.fill(chunk.slot);
    Blob where;
    Writer writer(where);
    for (std::uint32_t i = 0; i < count; ++i) {
      chunk.blocks.push_back(input.byte() % kBlocks);
      writer.put(std::uint32_t{input.byte() % kBlocks});
    }
    chunk.where = changed(std::move(where), input);
    if (!path.place(chunk)) return;
    if (input.byte() % 4 == 0) path.stop_placing(0);
    DataPath::Turn turn = DataPath::Turn::more;
    while (turn == DataPath::Turn::more) turn = path.advance();
    if (turn == DataPath::Turn::broken) return;
  }
  require(here.happened.size() <= 8);
}

void try_source(DataPath& path, Input& input, Side& here) {
  path.use(true);
  for (int chunks = 0; chunks < 40 && !input.empty(); ++chunks) {
    path.serve({.connection = 1, .pull = input.byte() % 2u, .layer = input.byte() % kLayers, .blocks = {1, 5}});
    if (input.byte() % 4 == 0) path.stop_serving(0);
    while (path.advance() == DataPath::Turn::more) continue;
    std::int32_t slot = 0;
    input.fill(slot);
    if (input.byte() % 2 == 0 && !path.credit(slot)) return;
  }
  require(here.happened.size() <= 40);
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::vector<const Backend*> kAlone = without_libraries();
  static Side source, sink;
  source.happened.clear();
  sink.happened.clear();
  Input input(data, size);
  const Backend* backend = kAlone[input.byte() % kAlone.size()];
  std::string why;
  const auto offering = backend->at_source(source.site(), why);
  if (offering == nullptr) return 0;
  Blob offer = changed(offering->offer(), input);
  if (backend->name != kRing.name) name_own_process(offer);
  const auto accepting = backend->at_sink(sink.site(), offer, why);
  const bool proven =
      offering->check(changed(accepting != nullptr ? accepting->proof().value_or(Blob{}) : Blob(32), input));
  if (accepting != nullptr && input.byte() % 2 == 0) try_sink(*accepting, input, sink);
  if (proven && input.byte() % 2 == 0) try_source(*offering, input, source);
  return 0;
}
