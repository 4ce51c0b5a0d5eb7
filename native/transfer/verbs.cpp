// One-sided through RDMA adapters: the sink's reads the source's pool over a reliable connection.
//
//   source                                              sink
//    Offer(rail, address, token and pool with keys) ──▶  connects to the address
//    connects  ◀── Answer(address)
//    Offer()   ──▶                                       reads the token as it will read blocks
//    compares  ◀── Answer(token)
//
// Peers may only read, and only the pool and that token. No peer writes into a pool: when a pull ends, this side
// alone decides that nothing more is written (docs/decisions/0010-reads-by-the-sink.md).
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "transfer/one_sided.h"
#include "transfer/verbs_queue.h"
#include "transfer/wire.h"

namespace baton::transfer {
namespace {

constexpr std::uint32_t kReadsUnderWay = 1024;

void prepare(const FabricOptions& options, const Pool& pool, Fabrics& fabrics) {
  fabrics.verbs = std::make_shared<VerbsDevices>(options, pool);
}

// Throws std::runtime_error where there are none.
VerbsDevices& devices(const Site& site) {
  if (site.fabrics.verbs == nullptr) throw std::runtime_error("it is none of this agent's backends");
  return *site.fabrics.verbs;
}

class VerbsSource : public OneSidedSource {
 public:
  VerbsSource(const Site& site, VerbsDevice& device)
      : OneSidedSource(site),
        device_(device),
        proof_memory_(device.calls, device.pd, proof_.data(), proof_.size(), true),
        queue_(device, 0) {}

  Blob offer() const override {
    Blob blob;
    if (connected_) return blob;
    Writer writer(blob);
    writer.put(devices(site_).rail_of(device_));
    queue_.address().put(writer);
    writer.put(reinterpret_cast<std::uint64_t>(proof_.data()));
    writer.put(proof_memory_.rkey());
    for (const VerbsMemory& layer : device_.layers) writer.put(layer.rkey());
    RemotePool::of(site_.pool).put(writer);
    return blob;
  }

  bool check(const Blob& answer) override {
    if (connected_) {
      proven_ = answer == proof_.token();
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
  bool has_more_to_offer() const override { return connected_ && !proven_; }

 private:
  VerbsDevice& device_;
  ProofMemory proof_{make_token()};
  VerbsMemory proof_memory_;
  bool connected_ = false;
  bool proven_ = false;
  VerbsQueue queue_;
};

struct VerbsOffer {
  std::uint32_t rail = 0;
  VerbsAddress address;
  std::uint64_t proof_address = 0;
  std::uint32_t proof_key = 0;
  std::vector<std::uint32_t> layer_keys;
};

class VerbsSink : public ReadingSink {
 public:
  VerbsSink(const Site& site, RemotePool remote, VerbsOffer offer, VerbsDevice& device)
      : ReadingSink(site, std::move(remote)),
        offer_(std::move(offer)),
        device_(device),
        proof_memory_(device.calls, device.pd, proof_.data(), proof_.size(), false),
        queue_(device, kReadsUnderWay) {
    queue_.connect(offer_.address);
  }

  std::optional<Blob> proof() const override {
    if (proven_) return proof_.token();
    if (resumed_) return std::nullopt;
    Blob blob;
    Writer writer(blob);
    queue_.address().put(writer);
    return blob;
  }
  bool resume(const Blob&) override {
    if (std::exchange(resumed_, true)) return false;
    const iovec local{proof_.data(), proof_.size()};
    const iovec remote{reinterpret_cast<void*>(offer_.proof_address), proof_.size()};
    return queue_.read({&local, 1}, proof_memory_.lkey(), {&remote, 1}, offer_.proof_key, nullptr);
  }
  int fd() const override { return queue_.fd(); }
  std::string why() const override { return queue_.why(); }

 protected:
  bool poll() override {
    ended_.clear();
    const bool good = queue_.poll(ended_);
    for (const VerbsQueue::Batch& batch : ended_) {
      if (batch.tag == nullptr) {
        proven_ = true;
      } else {
        ended(*static_cast<Read*>(batch.tag), batch.reads);
      }
    }
    return good;
  }
  bool begin(Read& read) override {
    const std::size_t count = std::min(read.pieces.local.size() - read.begun, queue_.room());
    if (count == 0) return true;
    const std::size_t first = std::exchange(read.begun, read.begun + count);
    const auto of = [&](const std::vector<iovec>& pieces) { return std::span(pieces).subspan(first, count); };
    return queue_.read(of(read.pieces.local), device_.layers[read.chunk.layer].lkey(), of(read.pieces.remote),
                       offer_.layer_keys[read.chunk.layer], &read);
  }

 private:
  const VerbsOffer offer_;
  VerbsDevice& device_;
  ProofMemory proof_;
  VerbsMemory proof_memory_;
  bool resumed_ = false;
  bool proven_ = false;
  std::vector<VerbsQueue::Batch> ended_;
  VerbsQueue queue_;  // Goes first: what it reads into must outlive it.
};

std::unique_ptr<DataPath> at_source(const Site& site, std::string& why) {
  try {
    return std::make_unique<VerbsSource>(site, devices(site).next());
  } catch (const std::runtime_error& error) {
    why = error.what();
    return nullptr;
  }
}

std::unique_ptr<DataPath> at_sink(const Site& site, const Blob& blob, std::string& why) {
  VerbsOffer offer;
  Reader reader(blob);
  reader.get(offer.rail);
  offer.address.get(reader);
  reader.get(offer.proof_address);
  reader.get(offer.proof_key);
  offer.layer_keys.resize(site.pool.layers.size());
  for (std::uint32_t& key : offer.layer_keys) reader.get(key);
  auto remote = RemotePool::get(reader, site.pool);
  if (!remote || !reader.finished() || offer.address.message_bytes_max < site.chunk_bytes_max) {
    why = "the source's offer makes no sense";
    return nullptr;
  }
  try {
    VerbsDevice& device = devices(site).of_rail(offer.rail);
    return std::make_unique<VerbsSink>(site, std::move(*remote), std::move(offer), device);
  } catch (const std::runtime_error& error) {
    why = error.what();
    return nullptr;
  }
}

}  // namespace

const Backend kVerbs{
    .name = "verbs",
    .at_source = &at_source,
    .at_sink = &at_sink,
    .striped = true,
    .prepare = &prepare,
    .fits = [](const Site& site) { return site.fabrics.verbs != nullptr && site.fabrics.verbs->present(); }};

}  // namespace baton::transfer
