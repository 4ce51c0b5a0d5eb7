// Chunks that the sink reads straight out of the source's blocks: one copy, on the sink's core.
//
// The source grants a chunk by naming its blocks, and sums them for the trailer meanwhile. Since nobody stops the
// source's owner from overwriting a block under the read, the trailer, with the lease's generation, is sent only once
// the sink says that it has read.
#pragma once

#include <algorithm>
#include <array>
#include <list>
#include <optional>

#include "transfer/data_path.h"

namespace baton::transfer {

// What a sink reads to prove that it can: random, of this connection only.
using Token = std::array<std::uint8_t, 32>;
[[nodiscard]] Token make_token();

// What a sink reads through adapters to prove that it can: large enough that packets of full size must come through,
// which networks drop that are set up only for small ones. The token is at its end.
class ProofMemory {
 public:
  ProofMemory() : bytes_(16 << 10) {}
  explicit ProofMemory(const Token& token) : ProofMemory() { std::ranges::copy(token, bytes_.end() - token.size()); }
  [[nodiscard]] std::uint8_t* data() { return bytes_.data(); }
  [[nodiscard]] const std::uint8_t* data() const { return bytes_.data(); }
  [[nodiscard]] std::size_t size() const { return bytes_.size(); }
  [[nodiscard]] Blob token() const { return {bytes_.end() - sizeof(Token), bytes_.end()}; }

 private:
  Blob bytes_;
};

// Where a source's blocks lie, in whatever address space the offer means.
struct RemotePool {
  std::vector<std::uint64_t> layers;
  std::uint64_t stride_bytes = 0;
  std::uint32_t blocks = 0;

  void put(class Writer& writer) const;
  // Nothing where the offer does not fit this side's pool.
  [[nodiscard]] static std::optional<RemotePool> get(class Reader& reader, const Pool& pool);
  // This side's pool, by its addresses.
  [[nodiscard]] static RemotePool of(const Pool& pool);
  // Whether all blocks of a layer that begins at `offset` lie in memory of so many bytes.
  [[nodiscard]] bool fits(std::uint64_t offset, std::uint64_t bytes, std::uint64_t block_bytes) const;
};

// Pairs of what is to be written and what is to be read there, of equal lengths.
struct Pieces {
  std::vector<iovec> local;
  std::vector<iovec> remote;
  // False: the grant does not fit the chunk or the source's pool. `more_bytes`: what the grant says beyond the blocks.
  [[nodiscard]] bool match(const Place& chunk, const Pool& pool, const RemotePool& remote_pool,
                           std::size_t more_bytes = 0);
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
  Pieces pieces_;
};

// A sink whose reads an adapter or a GPU carries out, so that they end later, some of them after their pull.
class ReadingSink : public DataPath {
 public:
  ReadingSink(const Site& site, RemotePool remote) : site_(site), remote_(std::move(remote)) {}
  void use(bool checksum) override { checksum_ = checksum; }
  void serve(const Serve&) override {}
  void stop_serving(PullId) override {}
  bool place(const Place& chunk) override;
  void stop_placing(PullId pull) override;
  bool places(PullId pull) const override;
  Turn advance() override;

 protected:
  struct Read {
    Place chunk;
    Pieces pieces;
    std::size_t begun = 0;  // Pieces.
    std::size_t ended = 0;
    bool stopped = false;
    std::uint32_t sum = 0;  // Where `sum_of` is not taken from memory.
    std::list<Read>::iterator self;
  };

  // Where to read a chunk. False: the peer broke the protocol.
  [[nodiscard]] virtual bool match(const Place& chunk, Pieces& pieces) {
    return pieces.match(chunk, site_.pool, remote_);
  }
  // Of what was written.
  [[nodiscard]] virtual std::uint32_t sum_of(const Read& read) const;

  // Learns of pieces that have ended, and says so by `ended`. False: broken.
  [[nodiscard]] virtual bool poll() = 0;
  // Begins further pieces, as many as there is room for now; those that end at once call `ended`, too. False: broken.
  [[nodiscard]] virtual bool begin(Read& read) = 0;
  // Asks for notice of what ends next; false: something has, already.
  [[nodiscard]] virtual bool rest() { return true; }
  void ended(Read& read, std::size_t pieces);
  // Whether a chunk has ended of which the source has not been told.
  [[nodiscard]] bool has_read() const { return !read_.empty(); }
  // What was begun has come to nothing. Not to be tried again: it waits for its pull's end, of which the source knows.
  void undo(Read& read, bool again);

  Site site_;
  RemotePool remote_;
  bool checksum_ = true;

 private:
  void settle(Read& read);
  void forget(std::list<Read>& reads, std::list<Read>::iterator read);

  // Bounded by what the core asks for per pull.
  std::list<Read> waiting_;
  std::list<Read> reading_;
  std::list<Read> read_;
  std::list<Read> undone_;
  Read* beginning_ = nullptr;  // The one of `reading_` of which not all pieces are begun.
};

}  // namespace baton::transfer
