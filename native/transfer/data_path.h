// How a connection's chunks travel: one interface, and one file for each way (see backends.cpp for the list).
//
// All calls come from the agent's progress thread and return without waiting. What an implementation completes, at once
// or later, it appends to the events it was made with. What takes time, it does in `advance`, a chunk at a time, so
// that commands, frames and other connections get their turn in between.
//
//   inline       source: serve ─▶ Served, the payload goes before its trailer          sink: place ─▶ Placed
//   slots        source: serve ─▶ Served(slot), once the slot is filled                sink: place ─▶ Placed(slot)
//   one-sided    source: serve ─▶ Granted(where)                                       sink: place(where) ─▶ Placed
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "transfer/events.h"
#include "transfer/pool.h"

namespace baton::transfer {

class Stream;
class VerbsDevices;
class UcxContext;
class CudaPool;

// What backends keep for all connections of an agent, since the pool is registered with an adapter once. Made when it
// is first needed; every connection goes before it does.
struct Fabrics {
  std::shared_ptr<VerbsDevices> verbs;
  std::shared_ptr<UcxContext> ucx;
  std::shared_ptr<CudaPool> cuda;
};

// What one end of a connection's data path may use.
struct Site {
  ConnectionId connection = 0;
  Stream& stream;
  const Pool& pool;
  std::uint64_t chunk_bytes_max = 0;
  std::vector<Event>& happened;
  const Fabrics& fabrics;
};

class DataPath {
 public:
  enum class Turn : std::uint8_t { idle, more, broken };

  DataPath() = default;
  DataPath(const DataPath&) = delete;
  DataPath& operator=(const DataPath&) = delete;
  virtual ~DataPath() = default;

  // Handshake. Source: what the sink needs to try this way. Sink: the proof that it works; nothing: `advance` is still
  // at it. Source: whether that is one, or whether there is more to say: then it is asked for one more offer, to
  // which the sink is resumed.
  [[nodiscard]] virtual Blob offer() const { return {}; }
  [[nodiscard]] virtual std::optional<Blob> proof() const { return Blob{}; }
  [[nodiscard]] virtual bool check(const Blob&) { return true; }
  [[nodiscard]] virtual bool has_more_to_offer() const { return false; }
  [[nodiscard]] virtual bool resume(const Blob&) { return false; }
  // Sink, with its proof: what else its owner should know of this way.
  [[nodiscard]] virtual std::string note() const { return {}; }
  virtual void use(bool checksum) = 0;

  // Source: let the sink have the chunk's blocks; ends in `Served` or `Granted`.
  virtual void serve(const Serve& chunk) = 0;
  // Source: forget chunks of a pull whose reading has not begun.
  virtual void stop_serving(PullId pull) = 0;
  // Source: a slot is empty again. False: the peer broke the protocol, as below.
  [[nodiscard]] virtual bool credit(std::int32_t) { return false; }
  // Sink: write the chunk into its blocks; ends in `Placed`.
  [[nodiscard]] virtual bool place(const Place& chunk) = 0;
  // Sink: after this returns nothing of a pull's earlier `place` begins to write. What an adapter has begun may go on,
  // while `places` says so; nothing writes any more once the path is destroyed.
  virtual void stop_placing(PullId pull) = 0;
  [[nodiscard]] virtual bool places(PullId) const { return false; }
  // Does the next piece of work. `more`: call again, with no need to wait for anything.
  [[nodiscard]] virtual Turn advance() { return Turn::idle; }
  // Readable when `advance` has something to do; -1: never of itself.
  [[nodiscard]] virtual int fd() const { return -1; }
  // Of a path that is broken.
  [[nodiscard]] virtual std::string why() const { return "the peer's memory cannot be read"; }
};

// A way whose chunks the progress thread copies itself, one per turn.
class CopyingPath : public DataPath {
 public:
  explicit CopyingPath(const Site& site) : site_(site) {}
  void use(bool checksum) override { checksum_ = checksum; }
  void serve(const Serve& chunk) override { serving_.push_back(chunk); }
  void stop_serving(PullId pull) override;
  bool place(const Place& chunk) override;
  void stop_placing(PullId pull) override;
  Turn advance() override;

 protected:
  [[nodiscard]] virtual bool can_serve() const { return true; }
  virtual void serve_now(const Serve& chunk) = 0;
  // Returns whether the chunk could be read; `crc` is of what was written.
  [[nodiscard]] virtual bool place_now(const Place& chunk, std::uint32_t& crc) = 0;

  Site site_;
  bool checksum_ = true;

 private:
  // Bounded by what the core asks for per pull.
  std::deque<Serve> serving_;
  std::deque<Place> placing_;
};

struct Backend {
  std::string_view name;
  // Both return null where this way does not work, and then say why.
  std::unique_ptr<DataPath> (*at_source)(const Site& site, std::string& why);
  std::unique_ptr<DataPath> (*at_sink)(const Site& site, const Blob& offer, std::string& why);
  // Whether several connections move more than one. Not where one core of this host copies anyway.
  bool striped = false;
  // What this backend keeps; takes as long as it takes to pin the pool's memory. Null: nothing.
  void (*prepare)(const FabricOptions& options, const Pool& pool, Fabrics& fabrics) = nullptr;
  // Whether it moves pools in CUDA memory, which no host code may touch.
  bool device = false;
  // Whether both ends must be on one host.
  bool local = false;
  // Whether the source has what this way needs: the pool, the adapter. Null: any has. Where it has not, nothing failed.
  bool (*fits)(const Site& site) = nullptr;
};

// One per file.
extern const Backend kCudaIpc;
extern const Backend kCudaPut;
extern const Backend kDirect;
extern const Backend kCma;
extern const Backend kRing;
extern const Backend kVerbs;
extern const Backend kUcx;
extern const Backend kTcp;

// All of this build, the fastest first.
[[nodiscard]] std::span<const Backend* const> backends();
[[nodiscard]] const Backend* find_backend(std::string_view name);

}  // namespace baton::transfer
