// One agent's end of a simulated connection: frames on the wire, and chunks that are being read and written.
//
// Frames of one connection keep their order, as on TCP. Everything else happens when the world's random choice says so:
// how far a chunk has been read or written, how long a frame travels, whether it arrives at all. Chunks travel as the
// three kinds of data paths let them (see data_path.h).
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "tests/model/memory.h"
#include "transfer/events.h"

namespace baton::model {

using namespace baton::transfer;

inline constexpr std::uint32_t kSlots = 2;

// A chunk's cells on their way to a slot or to the wire, as far as they have been read.
struct Transit {
  PullId pull = 0;
  std::uint32_t sequence = 0;
  std::uint64_t said_bytes = 0;
  std::size_t total = 0;
  std::vector<Cell> cells;
  [[nodiscard]] bool whole() const { return cells.size() == total; }
};
using Ring = std::array<std::vector<Cell>, kSlots>;
struct Farewell {};
using Message = std::variant<Blob, std::shared_ptr<Transit>, Farewell>;

struct Reading {
  Serve chunk;
  std::shared_ptr<Transit> transit;
  std::int32_t slot = -1;
  std::uint32_t crc = 0;
};
struct Writing {
  Place chunk;
  std::shared_ptr<Transit> transit;   // Cells of an inline chunk.
  std::vector<std::uint32_t> remote;  // Blocks of the source of a granted chunk.
  std::size_t written = 0;
};

// State that both ends of a connection share.
struct Link {
  bool silent = false;  // Nothing arrives any more, without a notice.
  double silent_since_s = 0;
  Ring ring;  // Chunks from source to sink.
};

struct End {
  std::uint32_t node = 0;  // This one's, and the other's.
  std::uint32_t peer_node = 0;
  ConnectionId id = 0;
  std::shared_ptr<Link> link;
  std::weak_ptr<End> peer;
  std::shared_ptr<Memory> remote;  // Memory of the other side; readable even after its death, as a mapping is.
  std::string backend;             // Empty: chunks may not travel yet.
  bool checksum = true;

  std::deque<Message> arriving;
  std::uint64_t lie = 0;               // Seed of the choices of a lie about the next chunk; 0: none.
  std::shared_ptr<Transit> announced;  // Frames behind an inline payload wait for it.
  bool discarding = false;
  bool stalls = false;  // Nothing is read or written, though frames come and go.
  std::vector<Writing> writing;

  std::deque<Serve> serving;  // Chunks not begun.
  std::vector<Reading> reading;
  std::deque<Blob> held;  // Frames behind an inline payload that is being sent.
  std::array<bool, kSlots> slot_used{};

  [[nodiscard]] bool is_inline() const { return backend == "tcp"; }
  [[nodiscard]] bool has_slots() const { return backend == "shm"; }
};

}  // namespace baton::model
