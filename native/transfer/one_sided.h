// Chunks that the sink reads straight out of the source's blocks: one copy, on the sink's core.
//
// The source grants a chunk by naming its blocks, and sums them for the trailer meanwhile. Since nobody stops the
// source's owner from overwriting a block under the read, the trailer, with the lease's generation, is sent only once
// the sink says that it has read.
#pragma once

#include <optional>

#include "transfer/data_path.h"

namespace baton::transfer {

// Where a source's blocks lie, in whatever address space the offer means.
struct RemotePool {
  std::vector<std::uint64_t> layers;
  std::uint64_t stride_bytes = 0;
  std::uint32_t blocks = 0;

  void put(class Writer& writer) const;
  // Nothing where the offer does not fit this side's pool.
  [[nodiscard]] static std::optional<RemotePool> get(class Reader& reader, const Pool& pool);
};

class OneSidedSource : public CopyingPath {
 public:
  using CopyingPath::CopyingPath;

 protected:
  void serve_now(const Serve& chunk) override;
  bool place_now(const Place&, std::uint32_t&) override { return false; }
};

class OneSidedSink : public CopyingPath {
 public:
  OneSidedSink(const Site& site, RemotePool remote) : CopyingPath(site), remote_(std::move(remote)) {}

 protected:
  // Copies `local` from `remote`, piece by piece of equal lengths. False: the source's memory cannot be read.
  [[nodiscard]] virtual bool read(std::span<const iovec> local, std::span<const iovec> remote, std::uint32_t& crc) = 0;
  void serve_now(const Serve&) override {}
  bool place_now(const Place& chunk, std::uint32_t& crc) override;

 private:
  RemotePool remote_;
  std::vector<iovec> local_pieces_;
  std::vector<iovec> remote_pieces_;
};

}  // namespace baton::transfer
