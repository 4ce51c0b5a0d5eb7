// Bytes that backends take from a peer: offers and grants on the sink's side, proofs and credits on the source's.
#include <unistd.h>

#include "fuzz/input.h"
#include "tests/path_end.h"
#include "transfer/one_sided.h"

using namespace baton::fuzz;
using baton::tests::PathEnd;

namespace {

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

void try_sink(DataPath& path, Input& input, PathEnd& here) {
  path.use(true);
  for (int chunks = 0; chunks < 8 && !input.empty(); ++chunks) {
    const std::uint32_t count = 1 + input.byte() % 3;
    Place chunk{.connection = 1, .pull = input.byte() % 2u, .slot = -1, .layer = input.byte() % PathEnd::kLayers};
    input.fill(chunk.slot);
    Blob where;
    Writer writer(where);
    for (std::uint32_t i = 0; i < count; ++i) {
      chunk.blocks.push_back(input.byte() % PathEnd::kBlocks);
      writer.put(std::uint32_t{input.byte() % PathEnd::kBlocks});
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

void try_source(DataPath& path, Input& input, PathEnd& here) {
  path.use(true);
  for (int chunks = 0; chunks < 40 && !input.empty(); ++chunks) {
    path.serve(
        {.connection = 1, .pull = input.byte() % 2u, .layer = input.byte() % PathEnd::kLayers, .blocks = {1, 5}});
    if (input.byte() % 4 == 0) path.stop_serving(0);
    while (path.advance() == DataPath::Turn::more) continue;
    std::int32_t slot = 0;
    input.fill(slot);
    if (input.byte() % 2 == 0 && !path.credit(slot)) return;
  }
  require(here.happened.size() <= 40);
}

// UCX needs a library of its own to come this far; without it an offer is taken apart and no more.
Blob offer_of_ucx(const Pool& pool) {
  Blob offer;
  Writer writer(offer);
  writer.put(Blob(8, 1));           // The worker's address.
  writer.put(std::uint64_t{4096});  // Address of its token.
  for (std::size_t keys = 0; keys <= pool.layers.size(); ++keys) writer.put(Blob(4, 1));
  RemotePool::of(pool).put(writer);
  return offer;
}

// Whether the source believes that this way works.
bool meet(DataPath& offering, DataPath& accepting, Input& input) {
  while (offering.check(changed(baton::tests::proof_of(accepting), input))) {
    if (!offering.has_more_to_offer()) return true;
    if (!accepting.resume(changed(offering.offer(), input))) return false;
  }
  return false;
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static PathEnd source, sink;
  source.happened.clear();
  sink.happened.clear();
  Input input(data, size);
  const Backend& backend = *backends()[input.byte() % backends().size()];
  std::string why;
  const auto offering = backend.at_source(source.site(), why);
  // The pools here are in host memory, for which GPUs offer nothing and take no offer.
  require((offering == nullptr) == (backend.name == kUcx.name || backend.device));
  Blob offer = changed(offering == nullptr ? offer_of_ucx(source.pool) : offering->offer(), input);
  if (backend.name == kDirect.name || backend.name == kCma.name) name_own_process(offer);
  const auto accepting = backend.at_sink(sink.site(), offer, why);
  require(accepting != nullptr || !why.empty());
  if (offering == nullptr) return 0;
  const bool proven =
      accepting == nullptr ? offering->check(changed(Blob(32), input)) : meet(*offering, *accepting, input);
  if (accepting != nullptr && input.byte() % 2 == 0) try_sink(*accepting, input, sink);
  if (proven && input.byte() % 2 == 0) try_source(*offering, input, source);
  return 0;
}
