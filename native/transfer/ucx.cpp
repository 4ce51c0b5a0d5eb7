// One-sided through UCX, which chooses among its transports by itself: RDMA, and over several adapters at once.
//
//   source                                                        sink
//    Offer(worker's address, token and pool with keys) ──▶         connects, and reads the token as it will read blocks
//    compares  ◀── Answer(token)
//
// A transport that cannot read by itself, such as TCP, has the source's worker answer: so both ends have a worker.
#include <algorithm>
#include <stdexcept>

#include "transfer/one_sided.h"
#include "transfer/ucx_endpoint.h"
#include "transfer/wire.h"

namespace baton::transfer {
namespace {

constexpr std::size_t kReadsUnderWay = 256;
constexpr int kSteps = 64;  // After so many, other connections get their turn.

void prepare(const FabricOptions& options, const Pool& pool, Fabrics& fabrics) {
  fabrics.ucx = std::make_shared<UcxContext>(options, pool);
}

// Throws std::runtime_error where there is none.
UcxContext& context(const Site& site) {
  if (site.fabrics.ucx == nullptr) throw std::runtime_error("it is none of this agent's backends");
  site.fabrics.ucx->check_usable();
  return *site.fabrics.ucx;
}

class UcxSource : public OneSidedSource {
 public:
  explicit UcxSource(const Site& site)
      : OneSidedSource(site), proof_memory_(context(site), proof_.data(), proof_.size()), worker_(context(site)) {
    Writer writer(offer_);
    writer.put(worker_.address());
    writer.put(reinterpret_cast<std::uint64_t>(proof_.data()));
    writer.put(proof_memory_.key());
    for (const UcxMemory& layer : context(site).layers()) writer.put(layer.key());
    RemotePool::of(site.pool).put(writer);
    if (offer_.size() > kBlobBytesMax) throw std::runtime_error("the keys of so many layers do not fit a frame");
  }

  Blob offer() const override { return offer_; }
  bool check(const Blob& answer) override { return answer == proof_.token(); }
  int fd() const override { return worker_.fd(); }
  std::string why() const override { return worker_.why(); }
  Turn advance() override {
    for (int step = 0; step < kSteps && worker_.progress(); ++step) {
    }
    const Turn turn = OneSidedSource::advance();
    if (turn != Turn::idle) return turn;
    const bool rests = worker_.rest();
    return !worker_.good() ? Turn::broken : rests ? Turn::idle : Turn::more;
  }

 private:
  ProofMemory proof_{make_token()};
  UcxMemory proof_memory_;
  UcxWorker worker_;
  Blob offer_;
};

struct UcxOffer {
  Blob address;
  std::uint64_t proof_address = 0;
  std::vector<Blob> keys;  // Keys of the layers, then of the token.
};

class UcxSink : public ReadingSink {
 public:
  UcxSink(const Site& site, RemotePool remote, const UcxOffer& offer)
      : ReadingSink(site, std::move(remote)),
        layers_(context(site).layers()),
        proof_memory_(context(site), proof_.data(), proof_.size()),
        worker_(context(site)) {
    worker_.ended = [this](void* tag) {
      if (tag == nullptr) {
        proven_ = worker_.good();
      } else {
        ended(*static_cast<Read*>(tag), 1);
      }
    };
    worker_.connect(offer.address, offer.keys);
    const bool begun =
        worker_.read(proof_.data(), offer.proof_address, proof_.size(), layers_.size(), proof_memory_, nullptr);
    if (!begun) throw std::runtime_error(worker_.why());
  }

  std::optional<Blob> proof() const override { return proven_ ? std::optional(proof_.token()) : std::nullopt; }
  int fd() const override { return worker_.fd(); }
  std::string why() const override { return worker_.why(); }
  std::string note() const override { return "goes over " + worker_.transports(); }

 protected:
  bool poll() override {
    // UCX copies by itself from another process of this host: a chunk a turn.
    for (int step = 0; step < kSteps && !has_read() && worker_.progress(); ++step) {
    }
    return worker_.good();
  }
  bool begin(Read& read) override {
    const auto& [local, remote] = read.pieces;
    const std::size_t layer = read.chunk.layer;
    while (read.begun < local.size() && worker_.under_way() < kReadsUnderWay) {
      const std::size_t piece = read.begun++;
      const auto from = reinterpret_cast<std::uint64_t>(remote[piece].iov_base);
      if (!worker_.read(local[piece].iov_base, from, local[piece].iov_len, layer, layers_[layer], &read)) return false;
    }
    return true;
  }
  bool rest() override { return worker_.rest(); }

 private:
  const std::vector<UcxMemory>& layers_;
  ProofMemory proof_;
  UcxMemory proof_memory_;
  bool proven_ = false;
  UcxWorker worker_;  // Goes first: what it reads into must outlive it.
};

std::unique_ptr<DataPath> at_source(const Site& site, std::string& why) {
  try {
    return std::make_unique<UcxSource>(site);
  } catch (const std::runtime_error& error) {
    why = error.what();
    return nullptr;
  }
}

std::unique_ptr<DataPath> at_sink(const Site& site, const Blob& blob, std::string& why) {
  UcxOffer offer;
  Reader reader(blob);
  reader.get(offer.address);
  reader.get(offer.proof_address);
  offer.keys.resize(site.pool.layers.size() + 1);
  reader.get(offer.keys.back());
  for (std::size_t layer = 0; layer < site.pool.layers.size(); ++layer) reader.get(offer.keys[layer]);
  auto remote = RemotePool::get(reader, site.pool);
  // UCX takes addresses and keys without their lengths: it believes a peer that has proven the secret.
  const bool whole = !offer.address.empty() && std::ranges::none_of(offer.keys, &Blob::empty);
  if (!remote || !reader.finished() || !whole) {
    why = "the source's offer makes no sense";
    return nullptr;
  }
  try {
    return std::make_unique<UcxSink>(site, std::move(*remote), offer);
  } catch (const std::runtime_error& error) {
    why = error.what();
    return nullptr;
  }
}

}  // namespace

const Backend kUcx{"ucx", &at_source, &at_sink, false, &prepare};

}  // namespace baton::transfer
