#include "transfer/shm.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "hash/crc32c.h"
#include "transfer/wire.h"

namespace baton::transfer {
namespace {

constexpr std::size_t kHeaderBytes = 4096;
constexpr std::size_t kTokenBytes = 32;
constexpr std::uint64_t kRingBytes = 8 << 20;
constexpr std::uint32_t kSlotsMin = 2;
constexpr std::uint32_t kSlotsMax = 64;
constexpr std::size_t kStripeBytes = 16 << 10;  // Copied and summed while it is in the first-level cache.
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
  // Only ever opens what an agent made: no separators, no other names.
  if (!offer.name.starts_with(kPrefix)) return std::nullopt;
  const auto rest = std::string_view(offer.name).substr(kPrefix.size());
  const bool plain = rest.find_first_not_of("0123456789abcdef") == std::string_view::npos;
  return plain && rest.size() == 32 ? std::optional(offer) : std::nullopt;
}

// Copies and returns `crc` extended over the bytes on the side that is asked for.
std::uint32_t copy(std::uint8_t* to, const std::uint8_t* from, std::size_t size, std::uint32_t crc, bool checksum,
                   bool sum_target) {
  while (size > 0) {
    const std::size_t stripe = std::min(size, kStripeBytes);
    if (checksum && !sum_target) crc = crc32c(crc, from, stripe);
    std::memcpy(to, from, stripe);
    if (checksum && sum_target) crc = crc32c(crc, to, stripe);
    to += stripe;
    from += stripe;
    size -= stripe;
  }
  return crc;
}

}  // namespace

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
  const bool made = ::ftruncate(fd, size) == 0 && ::posix_fallocate(fd, 0, size) == 0 && segment->map(fd, true);
  ::close(fd);
  if (!made) return nullptr;
  std::memcpy(segment->memory_, random + 16, kTokenBytes);
  return segment;
}

std::unique_ptr<Segment> Segment::open(const Blob& blob, std::uint64_t slot_bytes) {
  const auto offer = parse(blob);
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

ShmPath::ShmPath(std::unique_ptr<Segment> segment, ConnectionId connection, const Pool& pool, bool checksum,
                 std::vector<Event>& happened)
    : segment_(std::move(segment)), connection_(connection), pool_(pool), checksum_(checksum), happened_(happened) {
  for (auto slot = static_cast<std::int32_t>(segment_->slots()); slot-- > 0;) free_.push_back(slot);
}

void ShmPath::serve(const Serve& chunk) {
  if (free_.empty()) {
    waiting_.push_back(chunk);
  } else {
    fill(chunk);
  }
}

void ShmPath::stop_serving(PullId pull) {
  std::erase_if(waiting_, [&](const Serve& chunk) { return chunk.pull == pull; });
}

void ShmPath::fill(const Serve& chunk) {
  const std::int32_t slot = free_.back();
  free_.pop_back();
  std::uint8_t* const begin = segment_->slot(static_cast<std::uint32_t>(slot));
  std::uint8_t* to = begin;
  std::uint32_t crc = 0;
  for (const iovec& piece : pool_.pieces(chunk.layer, chunk.blocks)) {
    crc = copy(to, static_cast<const std::uint8_t*>(piece.iov_base), piece.iov_len, crc, checksum_, false);
    to += piece.iov_len;
  }
  if (chunk.corrupt) begin[(to - begin) / 2] ^= 0x10;
  happened_.push_back(Served{connection_, chunk.pull, chunk.sequence, slot, crc});
}

bool ShmPath::credit(std::int32_t slot) {
  if (slot < 0 || slot >= static_cast<std::int32_t>(segment_->slots())) return false;
  if (std::find(free_.begin(), free_.end(), slot) != free_.end()) return false;
  free_.push_back(slot);
  if (waiting_.empty()) return true;
  const Serve next = std::move(waiting_.front());
  waiting_.pop_front();
  fill(next);
  return true;
}

bool ShmPath::place(const Place& chunk) {
  if (chunk.slot < 0 || chunk.slot >= static_cast<std::int32_t>(segment_->slots())) return false;
  const std::uint8_t* from = segment_->slot(static_cast<std::uint32_t>(chunk.slot));
  std::uint32_t crc = 0;
  for (const iovec& piece : pool_.pieces(chunk.layer, chunk.blocks)) {
    crc = copy(static_cast<std::uint8_t*>(piece.iov_base), from, piece.iov_len, crc, checksum_, true);
    from += piece.iov_len;
  }
  happened_.push_back(Placed{connection_, chunk.pull, chunk.sequence, chunk.slot, crc});
  return true;
}

}  // namespace baton::transfer
