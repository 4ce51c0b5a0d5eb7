// The core's inputs (events) and outputs (actions). All are plain values.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "transfer/geometry.h"
#include "transfer/types.h"

namespace baton::transfer {

using Blob = std::vector<std::uint8_t>;

// ---------------------------------------------------------------- events: the owner's commands
// A command with bad arguments throws std::invalid_argument and changes nothing.

struct OpenLease {
  Key key{};
  double unclaimed_ttl_s = -1;  // Negative: the option's value.
};
struct ExtendLease {
  Key key{};
  std::uint64_t generation = 0;
  std::vector<std::uint32_t> blocks;
};
struct PostReady {
  Key key{};
  std::uint64_t generation = 0;
  std::int32_t layer = 0;  // -1: all.
  std::uint32_t tokens = 0;
  std::uint64_t released = 0;  // The point of the device's work that they follow, for the data path; 0: none.
};
struct CompleteLease {
  Key key{};
  std::uint64_t generation = 0;
  std::uint32_t tokens = 0;
};
struct RevokeLease {
  Key key{};
  bool final_ = false;
};
struct StartPull {
  Key key{};
  std::string endpoint;
  std::uint32_t first_token = 0;
  std::uint32_t tokens = 0;
  std::vector<std::uint32_t> blocks;
  double budget_s = 0;
};
struct CancelPull {
  Key key{};
};
struct ReleaseLease {
  Key key{};
  std::string endpoint;
};
// Takes effect from now on; a pull that has its first bytes keeps its delay.
struct SetFaults {
  Faults faults;
};
struct Shutdown {};  // Fails every pull and ends every lease.

// ---------------------------------------------------------------- events: what happened outside

struct Accepted {
  ConnectionId connection = 0;
};
struct Connected {
  ConnectionId connection = 0;
};
// The connection is closed: nothing of it is read, written or placed any more.
struct Closed {
  ConnectionId connection = 0;
  std::string detail;
  bool refused = false;  // It was not opened: nothing listens at the address.
};
struct FrameArrived {
  ConnectionId connection = 0;
  Blob frame;  // Type byte and body.
};
// The header of an inline chunk; its payload waits for `Place` or `Discard`.
struct DataArrived {
  ConnectionId connection = 0;
  PullId pull = 0;
  std::uint32_t sequence = 0;
  std::uint64_t bytes = 0;
};
// All bytes of a chunk have been read from the pool: they may change from now on.
struct Served {
  ConnectionId connection = 0;
  PullId pull = 0;
  std::uint32_t sequence = 0;
  std::int32_t slot = -1;  // -1: the payload went inline.
  std::uint32_t crc = 0;
};
// The sink may read a chunk in the source's blocks; `crc` was computed there.
struct Granted {
  ConnectionId connection = 0;
  PullId pull = 0;
  std::uint32_t sequence = 0;
  std::uint32_t crc = 0;
  Blob where;  // The location, for the sink's data path.
};
// A chunk is in its destination blocks; `crc` is of the bytes written. Its slot, if it had one, is empty again.
struct Placed {
  ConnectionId connection = 0;
  PullId pull = 0;
  std::uint32_t sequence = 0;
  std::int32_t slot = -1;
  std::uint32_t crc = 0;
};
// A staged chunk's tokens have been written into the pool's blocks.
struct Converted {
  ConnectionId connection = 0;
  PullId pull = 0;
  std::uint32_t sequence = 0;
};
// The answer to `StopPlacing`: nothing writes this pull's blocks before the next `Place` or `Convert`.
struct PlacingStopped {
  PullId pull = 0;
};
struct BackendOffered {
  ConnectionId connection = 0;
  bool ok = false;
  Blob offer;
  std::string why;   // The reason if it is not available.
  bool fits = true;  // Whether the source has what this way needs.
};
struct BackendAccepted {
  ConnectionId connection = 0;
  bool ok = false;
  Blob proof;
  std::string why;   // The reason if it failed, otherwise a note about this way.
  bool fits = true;  // Whether this way suits the two pools.
};
struct BackendChecked {
  ConnectionId connection = 0;
  bool ok = false;
};

using Event =
    std::variant<OpenLease, ExtendLease, PostReady, CompleteLease, RevokeLease, StartPull, CancelPull, ReleaseLease,
                 SetFaults, Shutdown, Accepted, Connected, Closed, FrameArrived, DataArrived, Served, Granted, Placed,
                 Converted, PlacingStopped, BackendOffered, BackendAccepted, BackendChecked>;

// ---------------------------------------------------------------- actions

struct Connect {
  ConnectionId connection = 0;
  std::string address;  // host:port
  std::string label;    // Connect from this agent's rail with this label, if there is one.
};
struct Close {
  ConnectionId connection = 0;
  std::string detail;
};
struct Send {
  ConnectionId connection = 0;
  Blob frame;
};
// Serve blocks of the pool to the sink; answered by `Served` or `Granted`, unless stopped before it began.
struct Serve {
  ConnectionId connection = 0;
  PullId pull = 0;
  std::uint32_t sequence = 0;
  std::uint32_t layer = 0;  // Counts tensors, as in `Place`.
  std::vector<std::uint32_t> blocks;
  std::uint64_t released = 0;  // Release value posted with this layer.
  // Injected corruption, after the checksum or before it.
  Corruption corruption = Corruption::none;
  bool before_checksum = false;
};
struct StopServing {
  ConnectionId connection = 0;
  PullId pull = 0;
};
// The sink has emptied a slot.
struct Credit {
  ConnectionId connection = 0;
  std::int32_t slot = 0;
};
// Write a chunk into blocks of the pool; answered by `Placed`, unless the connection closes, or the pull is stopped and
// the chunk has no slot.
struct Place {
  ConnectionId connection = 0;
  PullId pull = 0;
  std::uint32_t sequence = 0;
  std::int32_t slot = -1;
  std::uint32_t layer = 0;
  std::vector<std::uint32_t> blocks;
  Blob where;  // The location of a granted chunk.
};
// The source's blocks differ from this side's: from now on chunks of this connection are placed into staging blocks,
// and `Place` carries their numbers.
struct Stage {
  ConnectionId connection = 0;
  Geometry source;
};
// Write tokens of a complete chunk in staging blocks into blocks of the pool; answered by `Converted`, unless the pull
// is stopped or the connection closes.
struct Convert {
  ConnectionId connection = 0;
  PullId pull = 0;
  std::uint32_t sequence = 0;
  std::uint32_t layer = 0;  // Counts the source's tensors.
  std::vector<std::uint32_t> staged;
  std::uint32_t staged_origin = 0;  // Position in the sequence at which the first of these blocks begins.
  std::vector<std::uint32_t> blocks;
  std::uint32_t origin = 0;
  std::uint32_t first_token = 0;
  std::uint32_t tokens = 0;
};
// Discard the announced inline payload.
struct Discard {
  ConnectionId connection = 0;
};
struct StopPlacing {
  PullId pull = 0;
};
struct OfferBackend {
  ConnectionId connection = 0;
  std::string backend;
};
struct AcceptBackend {
  ConnectionId connection = 0;
  std::string backend;
  Blob offer;
};
struct CheckBackend {
  ConnectionId connection = 0;
  std::string backend;
  Blob proof;
};
// Send the chunks of this connection this way.
struct UseBackend {
  ConnectionId connection = 0;
  std::string backend;
  bool checksum = true;
};

using Action = std::variant<Connect, Close, Send, Serve, StopServing, Credit, Stage, Place, Convert, Discard,
                            StopPlacing, OfferBackend, AcceptBackend, CheckBackend, UseBackend, Report>;

}  // namespace baton::transfer
