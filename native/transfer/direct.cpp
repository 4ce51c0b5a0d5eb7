// One-sided, where the source's pool lies in a region of ours: the sink maps it and copies.
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "hash/crc32c.h"
#include "transfer/one_sided.h"
#include "transfer/region.h"
#include "transfer/wire.h"

namespace baton::transfer {
namespace {

class DirectSource : public OneSidedSource {
 public:
  using OneSidedSource::OneSidedSource;

  Blob offer() const override {
    const Region& region = *site_.pool.region;
    RemotePool own{.stride_bytes = site_.pool.stride_bytes, .blocks = site_.pool.blocks};
    for (const std::uint8_t* layer : site_.pool.layers) own.layers.push_back(layer - region.data());
    Blob blob;
    Writer writer(blob);
    writer.put(static_cast<std::int32_t>(::getpid()));
    writer.put(static_cast<std::int32_t>(region.fd()));
    writer.put(region.bytes());
    own.put(writer);
    return blob;
  }
  bool check(const Blob& proof) override { return proof == site_.pool.region->token(); }
};

class DirectSink : public OneSidedSink {
 public:
  DirectSink(const Site& site, RemotePool remote, std::shared_ptr<Region> region)
      : OneSidedSink(site, std::move(remote)), region_(std::move(region)) {}
  std::optional<Blob> proof() const override { return region_->token(); }

 protected:
  bool read(std::span<const iovec> local, std::span<const iovec> remote, std::uint32_t& crc) override {
    for (std::size_t i = 0; i < local.size(); ++i) {
      const std::uint8_t* from = region_->data() + reinterpret_cast<std::uint64_t>(remote[i].iov_base);
      if (checksum_) {
        crc = crc32c_copy(crc, local[i].iov_base, from, local[i].iov_len);
      } else {
        copy_uncached(local[i].iov_base, from, local[i].iov_len);
      }
    }
    return true;
  }

 private:
  std::shared_ptr<Region> region_;
};

std::unique_ptr<DataPath> at_source(const Site& site, std::string& why) {
  if (site.pool.region != nullptr) return std::make_unique<DirectSource>(site);
  why = "the source's pool does not lie in a region";
  return nullptr;
}

std::unique_ptr<DataPath> at_sink(const Site& site, const Blob& offer, std::string& why) {
  std::int32_t pid = 0, fd = 0;
  std::uint64_t bytes = 0;
  Reader reader(offer);
  reader.get(pid);
  reader.get(fd);
  reader.get(bytes);
  auto remote = RemotePool::get(reader, site.pool);
  const bool good = remote && reader.finished();
  // Every block must lie inside the region, since nothing is checked while chunks are read.
  const auto fits = [&](std::uint64_t layer) { return remote->fits(layer, bytes, site.pool.block_bytes); };
  if (!good || !std::all_of(remote->layers.begin(), remote->layers.end(), fits)) {
    why = "the source's offer makes no sense";
    return nullptr;
  }
  auto region = Region::open(pid, fd, bytes);
  if (region != nullptr) return std::make_unique<DirectSink>(site, std::move(*remote), std::move(region));
  why = std::string("the source's region cannot be mapped: ") + std::strerror(errno);
  return nullptr;
}

}  // namespace

const Backend kDirect{
    .name = "direct", .at_source = &at_source, .at_sink = &at_sink, .local = true, .fits = [](const Site& site) {
      return site.pool.region != nullptr;
    }};

}  // namespace baton::transfer
