// Chunks through a ring of slots in shared memory: the source copies in, the sink copies out and credits the slot.
//
//   | token, 32 bytes | rest of a page | slot 0 | slot 1 | …        one segment per connection, made by the source
//
// The segment has a random name under /dev/shm; the sink proves that it opened the same one by the token it finds in
// it, and the name is unlinked before the first chunk. So it works between processes, and containers, that share
// /dev/shm, and leaves nothing behind. Space is reserved when it is made: a full /dev/shm means another backend, not a
// SIGBUS later.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "hash/crc32c.h"
#include "transfer/data_path.h"
#include "transfer/wire.h"

namespace baton::transfer {
namespace {

constexpr std::size_t kHeaderBytes = 4096;
constexpr std::size_t kTokenBytes = 32;
constexpr std::uint64_t kRingBytes = 8 << 20;
constexpr std::uint32_t kSlotsMin = 2;
constexpr std::uint32_t kSlotsMax = 64;
constexpr std::string_view kPrefix = "/baton-";

struct Offer {
  std::string name;
  std::uint32_t slots = 0;
  std::uint64_t slot_bytes = 0;
};

std::optional<Offer> parse(const Blob& blob) {
  Offer offer;
  Reader reader(blob);
  reader.get(offer.name);
  reader.get(offer.slots);
  reader.get(offer.slot_bytes);
  if (!reader.finished() || offer.slots < kSlotsMin || offer.slots > kSlotsMax) return std::nullopt;
  // Opens only what an agent made: no separators, no other names.
  if (!offer.name.starts_with(kPrefix)) return std::nullopt;
  const auto rest = std::string_view(offer.name).substr(kPrefix.size());
  const bool plain = rest.find_first_not_of("0123456789abcdef") == std::string_view::npos;
  return plain && rest.size() == 32 ? std::optional(offer) : std::nullopt;
}

// Unlike most, this call returns its error.
bool reserve(int fd, off_t size) {
  errno = ::posix_fallocate(fd, 0, size);
  return errno == 0;
}

class Segment {
 public:
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Null where shared memory is not to be had.
  [[nodiscard]] static std::unique_ptr<Segment> create(std::uint64_t slot_bytes);
  // Null unless the offer names a segment here with slots of `slot_bytes`.
  [[nodiscard]] static std::unique_ptr<Segment> open(const Blob& offer, std::uint64_t slot_bytes);

  [[nodiscard]] Blob offer() const;
  [[nodiscard]] Blob token() const;
  void unlink();
  [[nodiscard]] std::uint32_t slots() const { return slots_; }
  [[nodiscard]] std::uint8_t* slot(std::uint32_t index) const;

 private:
  Segment() = default;
  [[nodiscard]] bool map(int fd, bool writable);

  std::string name_;
  bool linked_ = false;
  std::uint32_t slots_ = 0;
  std::uint64_t slot_bytes_ = 0;
  std::uint8_t* memory_ = nullptr;
};

Segment::~Segment() {
  unlink();
  if (memory_ != nullptr) ::munmap(memory_, kHeaderBytes + slots_ * slot_bytes_);
}

bool Segment::map(int fd, bool writable) {
  void* at = ::mmap(nullptr, kHeaderBytes + slots_ * slot_bytes_, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                    MAP_SHARED, fd, 0);
  if (at != MAP_FAILED) memory_ = static_cast<std::uint8_t*>(at);
  return at != MAP_FAILED;
}

std::unique_ptr<Segment> Segment::create(std::uint64_t slot_bytes) {
  std::unique_ptr<Segment> segment(new Segment);
  std::uint8_t random[16 + kTokenBytes];
  if (::getrandom(random, sizeof random, 0) != static_cast<ssize_t>(sizeof random)) return nullptr;
  segment->name_ = kPrefix;
  for (int i = 0; i < 16; ++i) {
    segment->name_ += "0123456789abcdef"[random[i] >> 4];
    segment->name_ += "0123456789abcdef"[random[i] & 15];
  }
  segment->slot_bytes_ = slot_bytes;
  segment->slots_ =
      static_cast<std::uint32_t>(std::clamp<std::uint64_t>(kRingBytes / slot_bytes, kSlotsMin, kSlotsMax));
  const int fd = ::shm_open(segment->name_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return nullptr;
  segment->linked_ = true;
  const auto size = static_cast<off_t>(kHeaderBytes + segment->slots_ * slot_bytes);
  const bool made = ::ftruncate(fd, size) == 0 && reserve(fd, size) && segment->map(fd, true);
  ::close(fd);
  if (!made) return nullptr;
  std::memcpy(segment->memory_, random + 16, kTokenBytes);
  return segment;
}

std::unique_ptr<Segment> Segment::open(const Blob& blob, std::uint64_t slot_bytes) {
  const auto offer = parse(blob);
  errno = EINVAL;
  if (!offer || offer->slot_bytes != slot_bytes) return nullptr;
  std::unique_ptr<Segment> segment(new Segment);
  segment->name_ = offer->name;
  segment->slots_ = offer->slots;
  segment->slot_bytes_ = slot_bytes;
  const int fd = ::shm_open(offer->name.c_str(), O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return nullptr;
  struct stat status{};
  const auto size = static_cast<off_t>(kHeaderBytes + segment->slots_ * slot_bytes);
  const bool mapped = ::fstat(fd, &status) == 0 && status.st_size == size && segment->map(fd, false);
  ::close(fd);
  return mapped ? std::move(segment) : nullptr;
}

Blob Segment::offer() const {
  Blob blob;
  Writer writer(blob);
  writer.put(name_);
  writer.put(slots_);
  writer.put(slot_bytes_);
  return blob;
}

Blob Segment::token() const {
  return {memory_, memory_ + kTokenBytes};
}

void Segment::unlink() {
  if (linked_) ::shm_unlink(name_.c_str());
  linked_ = false;
}

std::uint8_t* Segment::slot(std::uint32_t index) const {
  return memory_ + kHeaderBytes + index * slot_bytes_;
}

class RingPath : public CopyingPath {
 public:
  RingPath(const Site& site, std::unique_ptr<Segment> segment) : CopyingPath(site), segment_(std::move(segment)) {
    for (auto slot = static_cast<std::int32_t>(segment_->slots()); slot-- > 0;) free_.push_back(slot);
  }
  Blob offer() const override { return segment_->offer(); }
  std::optional<Blob> proof() const override { return segment_->token(); }
  bool check(const Blob& proof) override {
    // Both have it open now; without its name no other process can open it, and nothing outlives the two.
    segment_->unlink();
    return proof == segment_->token();
  }
  bool credit(std::int32_t slot) override {
    if (!is_slot(slot) || std::find(free_.begin(), free_.end(), slot) != free_.end()) return false;
    free_.push_back(slot);
    return true;
  }

 protected:
  bool can_serve() const override { return !free_.empty(); }
  void serve_now(const Serve& chunk) override {
    const std::int32_t slot = free_.back();
    free_.pop_back();
    std::uint8_t* const begin = segment_->slot(static_cast<std::uint32_t>(slot));
    std::uint8_t* to = begin;
    std::uint32_t crc = 0;
    for (const iovec& piece : site_.pool.pieces(chunk.layer, chunk.blocks)) {
      crc = copy(to, piece.iov_base, piece.iov_len, crc);
      to += piece.iov_len;
    }
    if (chunk.corruption != Corruption::none) {
      const std::span<std::uint8_t> bytes(begin, to);
      corrupt(bytes, chunk.corruption);
      if (checksum_ && chunk.before_checksum) crc = crc32c(0, bytes.data(), bytes.size());
    }
    site_.happened.push_back(Served{site_.connection, chunk.pull, chunk.sequence, slot, crc});
  }
  bool place_now(const Place& chunk, std::uint32_t& crc) override {
    if (!is_slot(chunk.slot)) return false;
    const std::uint8_t* from = segment_->slot(static_cast<std::uint32_t>(chunk.slot));
    for (const iovec& piece : site_.pool.pieces(chunk.layer, chunk.blocks)) {
      crc = copy(piece.iov_base, from, piece.iov_len, crc);
      from += piece.iov_len;
    }
    return true;
  }

 private:
  [[nodiscard]] bool is_slot(std::int32_t slot) const {
    return slot >= 0 && slot < static_cast<std::int32_t>(segment_->slots());
  }
  [[nodiscard]] std::uint32_t copy(void* to, const void* from, std::size_t size, std::uint32_t crc) const {
    if (checksum_) return crc32c_copy(crc, to, from, size);
    copy_uncached(to, from, size);
    return 0;
  }

  std::unique_ptr<Segment> segment_;
  std::vector<std::int32_t> free_;  // The one used last is the next, since it may still be in a cache.
};

std::unique_ptr<DataPath> with(const Site& site, std::unique_ptr<Segment> segment, std::string& why) {
  if (segment != nullptr) return std::make_unique<RingPath>(site, std::move(segment));
  why = std::string("no shared memory: ") + std::strerror(errno);
  return nullptr;
}

}  // namespace

const Backend kRing{
    .name = "shm",
    .at_source = [](const Site& site,
                    std::string& why) { return with(site, Segment::create(site.chunk_bytes_max), why); },
    .at_sink = [](const Site& site, const Blob& offer,
                  std::string& why) { return with(site, Segment::open(offer, site.chunk_bytes_max), why); },
    .local = true};

}  // namespace baton::transfer
