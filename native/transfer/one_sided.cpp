#include "transfer/one_sided.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "hash/crc32c.h"
#include "transfer/wire.h"

namespace baton::transfer {

Token make_token() {
  Token token{};
  if (::getrandom(token.data(), token.size(), 0) == static_cast<ssize_t>(token.size())) return token;
  throw std::system_error(errno, std::generic_category(), "no randomness");
}

RemotePool RemotePool::of(const Pool& pool) {
  RemotePool own{.stride_bytes = pool.stride_bytes, .blocks = pool.blocks};
  for (const std::uint8_t* layer : pool.layers) own.layers.push_back(reinterpret_cast<std::uint64_t>(layer));
  return own;
}

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

bool RemotePool::fits(std::uint64_t offset, std::uint64_t bytes, std::uint64_t block_bytes) const {
  if (blocks == 0 || offset > bytes || block_bytes > bytes - offset) return false;
  return blocks - 1 <= (bytes - offset - block_bytes) / stride_bytes;
}

void OneSidedSource::serve_now(const Serve& chunk) {
  std::uint32_t crc = 0;
  if (checksum_) {
    for (const iovec& piece : site_.pool.pieces(chunk.layer, chunk.blocks)) {
      crc = crc32c(crc, piece.iov_base, piece.iov_len);
    }
  }
  // The bytes pass no code of the agent on their way, so the sum is falsified instead.
  if (chunk.corruption != Corruption::none) crc ^= 0x10;
  site_.happened.push_back(Granted{site_.connection, chunk.pull, chunk.sequence, crc, where_of(chunk)});
}

Blob where_of(const Serve& chunk) {
  Blob where;
  Writer writer(where);
  for (const std::uint32_t block : chunk.blocks) writer.put(block);
  return where;
}

bool Pieces::match(const Place& chunk, const Pool& pool, const RemotePool& remote_pool, std::size_t more_bytes) {
  if (chunk.where.size() != chunk.blocks.size() * sizeof(std::uint32_t) + more_bytes) return false;
  local.clear();
  remote.clear();
  Reader reader(chunk.where);
  for (const std::uint32_t block : chunk.blocks) {
    std::uint32_t theirs = 0;
    reader.get(theirs);
    if (theirs >= remote_pool.blocks) return false;
    std::uint8_t* const to = pool.layers[chunk.layer] + block * pool.stride_bytes;
    const std::uint64_t from = remote_pool.layers[chunk.layer] + theirs * remote_pool.stride_bytes;
    // Neighbours on both sides become one piece.
    if (!local.empty()) {
      iovec& last = local.back();
      iovec& last_remote = remote.back();
      if (static_cast<std::uint8_t*>(last.iov_base) + last.iov_len == to &&
          reinterpret_cast<std::uint64_t>(last_remote.iov_base) + last_remote.iov_len == from) {
        last.iov_len += pool.block_bytes;
        last_remote.iov_len += pool.block_bytes;
        continue;
      }
    }
    local.push_back({to, pool.block_bytes});
    remote.push_back({reinterpret_cast<void*>(from), pool.block_bytes});
  }
  return true;
}

bool OneSidedSink::place_now(const Place& chunk, std::uint32_t& crc) {
  return pieces_.match(chunk, site_.pool, remote_) && read(pieces_.local, pieces_.remote, crc);
}

// ---------------------------------------------------------------- reads that an adapter carries out

bool ReadingSink::place(const Place& chunk) {
  Read& read = waiting_.emplace_back(Read{.chunk = chunk});
  read.self = std::prev(waiting_.end());
  return match(read.chunk, read.pieces);
}

// The source must learn that a slot is empty.
void ReadingSink::forget(std::list<Read>& reads, std::list<Read>::iterator read) {
  const Place& chunk = read->chunk;
  if (chunk.slot >= 0) {
    site_.happened.push_back(Placed{site_.connection, chunk.pull, chunk.sequence, chunk.slot, 0});
  }
  reads.erase(read);
}

void ReadingSink::stop_placing(PullId pull) {
  for (std::list<Read>* reads : {&waiting_, &read_, &undone_}) {
    for (auto at = reads->begin(); at != reads->end();) {
      const auto read = at++;
      if (read->chunk.pull == pull) forget(*reads, read);
    }
  }
  for (auto at = reading_.begin(); at != reading_.end();) {
    Read& read = *at++;
    if (read.chunk.pull != pull) continue;
    read.stopped = true;
    if (beginning_ == &read) beginning_ = nullptr;
    settle(read);
  }
}

bool ReadingSink::places(PullId pull) const {
  return std::any_of(reading_.begin(), reading_.end(), [&](const Read& read) { return read.chunk.pull == pull; });
}

void ReadingSink::ended(Read& read, std::size_t pieces) {
  read.ended += pieces;
  settle(read);
}

// A read that is stopped needs to end only what it has begun.
void ReadingSink::settle(Read& read) {
  const bool whole = read.begun == read.pieces.local.size();
  if (read.ended < read.begun || !(whole || read.stopped)) return;
  if (read.stopped) {
    forget(reading_, read.self);
  } else {
    read_.splice(read_.end(), reading_, read.self);
  }
}

void ReadingSink::undo(Read& read, bool again) {
  if (read.stopped) return forget(reading_, read.self);
  read.begun = 0;
  std::list<Read>& to = again ? waiting_ : undone_;
  to.splice(to.end(), reading_, read.self);
}

std::uint32_t ReadingSink::sum_of(const Read& read) const {
  std::uint32_t crc = 0;
  for (const iovec& piece : read.pieces.local) crc = crc32c(crc, piece.iov_base, piece.iov_len);
  return crc;
}

// Sums one of the chunks that were read, per turn.
DataPath::Turn ReadingSink::advance() {
  if (!poll()) return Turn::broken;
  while (beginning_ != nullptr || !waiting_.empty()) {
    if (beginning_ == nullptr) {
      beginning_ = &waiting_.front();
      reading_.splice(reading_.end(), waiting_, beginning_->self);
    }
    if (!begin(*beginning_)) return Turn::broken;
    if (beginning_->begun < beginning_->pieces.local.size()) break;
    beginning_ = nullptr;
  }
  if (!read_.empty()) {
    const Read& read = read_.front();
    site_.happened.push_back(
        Placed{site_.connection, read.chunk.pull, read.chunk.sequence, read.chunk.slot, checksum_ ? sum_of(read) : 0});
    read_.pop_front();
  }
  return read_.empty() && rest() ? Turn::idle : Turn::more;
}

}  // namespace baton::transfer
