#include "transfer/verbs_path.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "transfer/wire.h"

namespace baton::transfer {
namespace {

constexpr std::uint32_t kReadsUnderWay = 1024;

}  // namespace

VerbsDevices& verbs_devices(const Site& site) {
  if (site.fabrics.verbs == nullptr) throw std::runtime_error("it is none of this agent's backends");
  return *site.fabrics.verbs;
}

void VerbsOffer::put(Writer& writer) const {
  writer.put(rail);
  address.put(writer);
  writer.put(proof_address);
  writer.put(proof_key);
  for (const std::uint32_t key : layer_keys) writer.put(key);
  pool.put(writer);
}

std::optional<VerbsOffer> VerbsOffer::get(const Blob& blob, const Site& site, std::string& why) {
  VerbsOffer offer;
  Reader reader(blob);
  reader.get(offer.rail);
  offer.address.get(reader);
  reader.get(offer.proof_address);
  reader.get(offer.proof_key);
  offer.layer_keys.resize(site.pool.layers.size());
  for (std::uint32_t& key : offer.layer_keys) reader.get(key);
  auto pool = RemotePool::get(reader, site.pool);
  if (!pool || !reader.finished() || offer.address.message_bytes_max < site.chunk_bytes_max) {
    why = "the source's offer makes no sense";
    return std::nullopt;
  }
  offer.pool = std::move(*pool);
  return offer;
}

// ---------------------------------------------------------------- the source

VerbsServer::VerbsServer(const Site& site, VerbsDevice& device, const VerbsMemory& proof, std::uint64_t proof_address,
                         Blob token)
    : token_(std::move(token)), queue_(device, 0) {
  offer_ = {.rail = verbs_devices(site).rail_of(device),
            .address = queue_.address(),
            .proof_address = proof_address,
            .proof_key = proof.rkey(),
            .pool = RemotePool::of(site.pool)};
  for (const VerbsMemory& layer : device.layers) offer_.layer_keys.push_back(layer.rkey());
}

Blob VerbsServer::offer() const {
  Blob blob;
  Writer writer(blob);
  if (!connected_) offer_.put(writer);
  return blob;
}

bool VerbsServer::check(const Blob& answer) {
  if (connected_) {
    proven_ = answer == token_;
    return proven_;
  }
  VerbsAddress sink;
  Reader reader(answer);
  sink.get(reader);
  if (!reader.finished()) return false;
  try {
    queue_.connect(sink);
    connected_ = true;
  } catch (const std::runtime_error&) {
    // The next way is tried, as after a wrong token.
  }
  return connected_;
}

// ---------------------------------------------------------------- the sink

VerbsSink::VerbsSink(const Site& site, VerbsOffer offer, VerbsDevice& device, const iovec& landing,
                     const VerbsMemory& landing_memory)
    : ReadingSink(site, offer.pool),
      offer_(std::move(offer)),
      device_(device),
      landing_(landing),
      landing_key_(landing_memory.lkey()),
      queue_(device, kReadsUnderWay) {
  queue_.connect(offer_.address);
}

std::optional<Blob> VerbsSink::proof() const {
  if (token_ || resumed_) return token_;
  Blob blob;
  Writer writer(blob);
  queue_.address().put(writer);
  return blob;
}

bool VerbsSink::resume(const Blob&) {
  if (std::exchange(resumed_, true)) return false;
  const iovec remote{reinterpret_cast<void*>(offer_.proof_address), landing_.iov_len};
  return queue_.read({&landing_, 1}, landing_key_, {&remote, 1}, offer_.proof_key, nullptr);
}

bool VerbsSink::poll() {
  ended_.clear();
  const bool good = queue_.poll(ended_);
  if (!ended_.empty()) settle_writes();
  for (const VerbsQueue::Batch& batch : ended_) {
    if (batch.tag == nullptr) {
      token_ = token_read();
    } else {
      landed(*static_cast<Read*>(batch.tag), batch.reads);
    }
  }
  return good;
}

bool VerbsSink::begin(Read& read) {
  const std::size_t count = std::min(read.pieces.local.size() - read.begun, queue_.room());
  if (count == 0) return true;
  const std::size_t first = std::exchange(read.begun, read.begun + count);
  const auto of = [&](const std::vector<iovec>& pieces) { return std::span(pieces).subspan(first, count); };
  return queue_.read(of(read.pieces.local), device_.layers[read.chunk.layer].lkey(), of(read.pieces.remote),
                     offer_.layer_keys[read.chunk.layer], &read);
}

}  // namespace baton::transfer
