// Types that the whole transfer agent shares: keys, causes, options, limits, reports.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "hash/blake3.h"
#include "transfer/faults.h"

namespace baton::transfer {

inline constexpr std::size_t kKeyBytes = 16;

using Key = std::array<std::uint8_t, kKeyBytes>;
using ConnectionId = std::uint64_t;  // Even: opened by the core. Odd: accepted by the shell.
using PullId = std::uint64_t;        // Unique within one incarnation.

struct KeyHash {
  std::size_t operator()(const Key& key) const {
    std::uint64_t first = 0;  // Keys are digests already.
    std::memcpy(&first, key.data(), sizeof first);
    return first;
  }
};

// The reason of an end. The names are those of baton.transfer.Cause; the values travel on the wire.
enum class Cause : std::uint8_t {
  none,
  cancelled,
  deadline,
  unreachable,
  refused,
  revoked,
  expired,
  checksum,
  stalled,
  layout,
  model,
};
inline constexpr std::uint8_t kCauses = 11;

enum class ReportKind : std::uint8_t {
  pull_progress,
  pull_done,
  pull_failed,
  lease_asked,
  lease_released,
  lease_ended
};

// The traffic of one rail, for one pull or, in the statistics, for all.
struct RailShare {
  std::string rail;  // The label that the source gave it, or its address.
  std::uint64_t bytes = 0;
  std::uint64_t chunks = 0;
  std::uint64_t retired = 0;  // Connections that were lost or hung.
  double bytes_per_s = 0;     // Speed last measured on one connection; 0: not yet.
};

// A report to the agent's owner; see baton.transfer.TransferEvent.
struct Report {
  ReportKind kind{};
  Key key{};
  Cause cause = Cause::none;
  std::string detail;
  std::uint32_t layers = 0;
  std::uint64_t bytes = 0;
  std::uint32_t tokens = 0;
  double waiting_s = 0;
  double moving_s = 0;
  std::string backend;
  std::string declined;  // Why preferred backends were not used, and notes of the backend in use.
  std::uint32_t restarts = 0;
  std::vector<RailShare> rails;
};

// Bounds on everything that a peer or a caller can make grow.
struct Limits {
  std::size_t leases = 65536;
  std::size_t pulls = 65536;
  std::size_t parked = 4096;
  std::size_t readers_per_lease = 64;  // One for each connection that a pull uses.
  std::size_t peers = 1024;
  std::size_t connections = 2048;
  std::size_t ended = 4096;  // Keys remembered after their lease ended.
  double ended_ttl_s = 60;
  std::size_t reports = 262144;
  std::uint32_t chunk_bytes = 1 << 20;        // A chunk is at least one block, even if that is larger.
  std::uint32_t chunk_blocks = 1024;          // Lets a grant fit a frame.
  std::uint32_t chunks_in_flight = 16;        // Per pull and lane, requested by the sink.
  std::uint64_t staging_bytes = 8 << 20;      // Per lane to a source with other blocks; at least two chunks.
  std::uint64_t lane_window_bytes = 2 << 20;  // The same, if several lanes share a pull; at least two chunks.
  std::size_t lanes = 16;                     // Per source.
  std::size_t rails = 1024;                   // Rails with statistics.
  std::uint32_t chunks_served = 64;           // Per pull, accepted by the source.
  double idle_s = 60;                         // A connection without pulls is closed after this.
  double reconnect_s = 0.05;
  double rail_retry_s = 5;  // A lost rail is not retried for this long while others work.
};

// Options of the libraries that are loaded at run time, when an agent that lists their backends gets its pool.
struct FabricOptions {
  std::string verbs_library = "libibverbs.so.1";
  // Name, name:port or name:port:GID index, joined by commas: connections take them in turn. Empty: every device with
  // an active port, with the GID that suits it.
  std::string verbs_devices;
  std::string ucx_library = "libucp.so.0";  // Configured by UCX's own variables, such as UCX_TLS.
  std::string gpu_library;                  // Empty: the build's own, see gpu/device.h.
};

struct Options {
  std::string secret;
  std::vector<std::string> backends = {"direct", "shm", "cma", "verbs", "tcp"};
  FabricOptions fabric;
  std::vector<std::string> striped;    // The backends with which several lanes are faster than one.
  std::vector<std::string> local;      // The backends that need both ends on one host.
  std::string host;                    // Unique name of this host; empty: unknown.
  std::uint32_t streams = 1;           // Lanes per rail.
  std::uint64_t lane_bytes = 4 << 20;  // A pull gets one lane more per this many bytes.
  bool checksum = true;
  bool tells_asks = false;  // Whether a lease's first ask is reported.
  double lease_ttl_s = 5;
  double unclaimed_ttl_s = 30;
  double wanted_timeout_s = 10;
  double connect_timeout_s = 1;
  double stall_timeout_s = 10;
  Faults faults;
  Limits limits;
  std::uint64_t incarnation = 0;  // Identifies this run of the agent; random in production.
  Digest entropy{};               // The only source of nonces: equal entropy, equal run.
};

struct Stats {
  std::uint64_t leases = 0;
  std::uint64_t leased_blocks = 0;
  std::uint64_t pulls = 0;
  std::uint64_t parked = 0;
  std::uint64_t readers = 0;  // Readers of this agent's leases, parked ones included.
  std::uint64_t peers = 0;    // Peers that this agent pulls from.
  std::uint64_t connections = 0;
  std::uint64_t pulled_bytes = 0;
  std::uint64_t pulled_blocks = 0;
  std::uint64_t served_bytes = 0;
  std::uint64_t pulls_done = 0;
  std::uint64_t pulls_failed = 0;
  std::uint64_t leases_expired = 0;
  std::uint64_t leases_revoked = 0;
  std::uint64_t checksum_failures = 0;
  std::uint64_t protocol_errors = 0;  // Connections dropped because of what a peer sent.
  std::uint64_t fallbacks = 0;        // Pulls whose preferred backend should work between the two hosts and did not.
  std::uint64_t lanes_retired = 0;    // Connections to sources that were lost or hung.
  std::vector<RailShare> rails;       // The sources' rails that this sink has used.
};

}  // namespace baton::transfer
