// Chunks that the sink reads straight out of the source's blocks: one copy, on the sink's core.
//
// The source grants a chunk by naming its blocks, and meanwhile computes their checksum for the trailer. Nothing stops
// the source's owner from overwriting a block during the read, so the trailer, with the lease's generation, is sent
// only once the sink reports the end of its read.
#pragma once

#include <algorithm>
#include <array>
#include <list>
#include <optional>

#include "transfer/data_path.h"

namespace baton::transfer {

// The random token of one connection. A sink proves its access by reading it.
using Token = std::array<std::uint8_t, 32>;
[[nodiscard]] Token make_token();

// The memory that a sink reads through adapters to prove its access, with the token at its end. It is large enough for
// packets of full size, which networks set up only for small ones drop.
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

// The location of a source's blocks, in the address space of the offer.
struct RemotePool {
  std::vector<std::uint64_t> layers;
  std::uint64_t stride_bytes = 0;
  std::uint32_t blocks = 0;

  void put(class Writer& writer) const;
  // Returns nothing if the offer does not fit this side's pool.
  [[nodiscard]] static std::optional<RemotePool> get(class Reader& reader, const Pool& pool);
  // This side's pool, by its addresses.
  [[nodiscard]] static RemotePool of(const Pool& pool);
  // Whether all blocks of a layer that begins at `offset` lie in memory of `bytes` bytes.
  [[nodiscard]] bool fits(std::uint64_t offset, std::uint64_t bytes, std::uint64_t block_bytes) const;
};

// The grant of a chunk: the source's blocks.
[[nodiscard]] Blob where_of(const Serve& chunk);

// Pairs of equally long pieces: the local one to write and the remote one to read.
struct Pieces {
  std::vector<iovec> local;
  std::vector<iovec> remote;
  // False: the grant does not fit the chunk or the source's pool. `more_bytes`: length of the grant beyond the blocks.
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
  // Copies `remote` to `local` in pieces of equal lengths. False: the source's memory cannot be read.
  [[nodiscard]] virtual bool read(std::span<const iovec> local, std::span<const iovec> remote, std::uint32_t& crc) = 0;
  void serve_now(const Serve&) override {}
  bool place_now(const Place& chunk, std::uint32_t& crc) override;

 private:
  RemotePool remote_;
  Pieces pieces_;
};

// A sink whose reads are carried out by an adapter or a GPU, so that they end later, some of them after their pull.
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
    std::uint32_t sum = 0;  // The sum, for a `sum_of` that does not read memory.
    std::list<Read>::iterator self;
  };

  // Finds the pieces of a chunk. False: the peer broke the protocol.
  [[nodiscard]] virtual bool match(const Place& chunk, Pieces& pieces) {
    return pieces.match(chunk, site_.pool, remote_);
  }
  // Checksum of the bytes written.
  [[nodiscard]] virtual std::uint32_t sum_of(const Read& read) const;

  // Calls `ended` for pieces that have ended. False: the path is broken.
  [[nodiscard]] virtual bool poll() = 0;
  // Begins as many further pieces as there is room for; calls `ended` for those that end at once. False: broken.
  [[nodiscard]] virtual bool begin(Read& read) = 0;
  // Requests a notification of the next end; false: something has ended already.
  [[nodiscard]] virtual bool rest() { return true; }
  void ended(Read& read, std::size_t pieces);
  // Whether a finished chunk has not been reported to the source yet.
  [[nodiscard]] bool has_read() const { return !read_.empty(); }
  // The read has failed. Unless it is tried `again`, it waits for the end of its pull, of which the source knows.
  void undo(Read& read, bool again);

  Site site_;
  RemotePool remote_;
  bool checksum_ = true;

 private:
  void settle(Read& read);
  void forget(std::list<Read>& reads, std::list<Read>::iterator read);

  // Bounded by the core's limit on requests per pull.
  std::list<Read> waiting_;
  std::list<Read> reading_;
  std::list<Read> read_;
  std::list<Read> undone_;
  Read* beginning_ = nullptr;  // The read in `reading_` with pieces not begun.
};

}  // namespace baton::transfer
