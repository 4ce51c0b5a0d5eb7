// Chunks through a ring of slots in shared memory: the source copies in, the sink copies out and credits the slot.
//
//   | token, 32 bytes | rest of a page | slot 0 | slot 1 | …        one segment per connection, made by the source
//
// The segment has a random name under /dev/shm; the sink proves that it opened the same one by the token it finds in
// it, and the name is unlinked before the first chunk. So it works between processes, and containers, that share
// /dev/shm, and leaves nothing behind. Space is reserved when it is made: a full /dev/shm means another backend, not a
// SIGBUS later.
#pragma once

#include <deque>
#include <memory>
#include <optional>

#include "transfer/data_path.h"
#include "transfer/pool.h"

namespace baton::transfer {

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

class ShmPath : public DataPath {
 public:
  ShmPath(std::unique_ptr<Segment> segment, ConnectionId connection, const Pool& pool, bool checksum,
          std::vector<Event>& happened);
  void serve(const Serve& chunk) override;
  void stop_serving(PullId pull) override;
  bool credit(std::int32_t slot) override;
  bool place(const Place& chunk) override;
  void stop_placing(PullId) override {}  // `place` has finished before it returns.

 private:
  void fill(const Serve& chunk);

  std::unique_ptr<Segment> segment_;
  ConnectionId connection_;
  const Pool& pool_;
  bool checksum_;
  std::vector<Event>& happened_;
  std::vector<std::int32_t> free_;
  std::deque<Serve> waiting_;  // For a slot; bounded by what the core accepts per pull.
};

}  // namespace baton::transfer
