#include "transfer/one_sided.h"

#include "hash/crc32c.h"
#include "transfer/wire.h"

namespace baton::transfer {

void RemotePool::put(Writer& writer) const {
  writer.put(stride_bytes);
  writer.put(blocks);
  writer.put(static_cast<std::uint32_t>(layers.size()));
  for (const std::uint64_t layer : layers) writer.put(layer);
}

std::optional<RemotePool> RemotePool::get(Reader& reader, const Pool& pool) {
  RemotePool remote;
  std::uint32_t layers = 0;
  reader.get(remote.stride_bytes);
  reader.get(remote.blocks);
  reader.get(layers);
  if (layers != pool.layers.size()) return std::nullopt;
  remote.layers.resize(layers);
  for (std::uint64_t& layer : remote.layers) reader.get(layer);
  if (remote.stride_bytes < pool.block_bytes) return std::nullopt;
  return remote;
}

void OneSidedSource::serve_now(const Serve& chunk) {
  std::uint32_t crc = 0;
  if (checksum_) {
    for (const iovec& piece : site_.pool.pieces(chunk.layer, chunk.blocks)) {
      crc = crc32c(crc, piece.iov_base, piece.iov_len);
    }
  }
  if (chunk.corrupt) crc ^= 0x10;  // Nothing of ours touches the bytes on their way, so the sum is what is falsified.
  Blob where;
  Writer writer(where);
  for (const std::uint32_t block : chunk.blocks) writer.put(block);
  site_.happened.push_back(Granted{site_.connection, chunk.pull, chunk.sequence, crc, std::move(where)});
}

bool OneSidedSink::place_now(const Place& chunk, std::uint32_t& crc) {
  if (chunk.where.size() != chunk.blocks.size() * sizeof(std::uint32_t)) return false;
  local_pieces_.clear();
  remote_pieces_.clear();
  Reader reader(chunk.where);
  for (const std::uint32_t block : chunk.blocks) {
    std::uint32_t theirs = 0;
    reader.get(theirs);
    if (theirs >= remote_.blocks) return false;
    std::uint8_t* const to = site_.pool.layers[chunk.layer] + block * site_.pool.stride_bytes;
    const std::uint64_t from = remote_.layers[chunk.layer] + theirs * remote_.stride_bytes;
    // Neighbours on both sides become one piece.
    if (!local_pieces_.empty()) {
      iovec& last = local_pieces_.back();
      iovec& last_remote = remote_pieces_.back();
      if (static_cast<std::uint8_t*>(last.iov_base) + last.iov_len == to &&
          reinterpret_cast<std::uint64_t>(last_remote.iov_base) + last_remote.iov_len == from) {
        last.iov_len += site_.pool.block_bytes;
        last_remote.iov_len += site_.pool.block_bytes;
        continue;
      }
    }
    local_pieces_.push_back({to, site_.pool.block_bytes});
    remote_pieces_.push_back({reinterpret_cast<void*>(from), site_.pool.block_bytes});
  }
  return read(local_pieces_, remote_pieces_, crc);
}

}  // namespace baton::transfer
