// The data path of a connection's chunks: one interface, and one file per backend (see backends.cpp for the list).
//
// All calls come from the agent's progress thread and return without waiting. An implementation appends completions, at
// once or later, to the events it was made with. Slow work happens in `advance`, one chunk at a time, so that commands,
// frames and other connections get their turn in between.
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

// State that backends keep for all connections of an agent, since the pool is registered with an adapter only once.
// Made on first use; outlives every connection.
struct Fabrics {
  std::shared_ptr<CudaPool> cuda;
  std::shared_ptr<VerbsDevices> verbs;  // Goes before the GPU's memory that is registered with its adapters.
  std::shared_ptr<UcxContext> ucx;
};

// The objects that one end of a connection's data path may use.
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

  // Handshake. Source, `offer`: the data for the sink to try this way. Sink, `proof`: the proof that it works; nothing
  // while `advance` still works on it. Source, `check`: whether the proof is valid; `has_more_to_offer`: whether there
  // is one more offer, which the sink gets by `resume`.
  [[nodiscard]] virtual Blob offer() const { return {}; }
  [[nodiscard]] virtual std::optional<Blob> proof() const { return Blob{}; }
  [[nodiscard]] virtual bool check(const Blob&) { return true; }
  [[nodiscard]] virtual bool has_more_to_offer() const { return false; }
  [[nodiscard]] virtual bool resume(const Blob&) { return false; }
  // Sink, with its proof: a note about this way for its owner.
  [[nodiscard]] virtual std::string note() const { return {}; }
  virtual void use(bool checksum) = 0;

  // Source: serves the chunk's blocks to the sink; ends in `Served` or `Granted`.
  virtual void serve(const Serve& chunk) = 0;
  // Source: forgets a pull's chunks that are not being read yet.
  virtual void stop_serving(PullId pull) = 0;
  // Source: a slot is empty again. False: the peer broke the protocol, as below.
  [[nodiscard]] virtual bool credit(std::int32_t) { return false; }
  // Sink: writes the chunk into its blocks; ends in `Placed`.
  [[nodiscard]] virtual bool place(const Place& chunk) = 0;
  // Sink: once this returns, no earlier `place` of the pull begins to write. Writes that an adapter has begun may go on
  // while `places` returns true; nothing writes once the path is destroyed.
  virtual void stop_placing(PullId pull) = 0;
  [[nodiscard]] virtual bool places(PullId) const { return false; }
  // Does the next piece of work. `more`: call again without waiting.
  [[nodiscard]] virtual Turn advance() { return Turn::idle; }
  // Readable when `advance` has something to do; -1: there is no such descriptor.
  [[nodiscard]] virtual int fd() const { return -1; }
  // The reason why the path is broken.
  [[nodiscard]] virtual std::string why() const { return "the peer's memory cannot be read"; }
};

// A data path whose chunks the progress thread copies itself, one per turn.
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
  // Returns whether the chunk could be read; `crc` is that of the bytes written.
  [[nodiscard]] virtual bool place_now(const Place& chunk, std::uint32_t& crc) = 0;

  Site site_;
  bool checksum_ = true;

 private:
  // Bounded by the core's limit on requests per pull.
  std::deque<Serve> serving_;
  std::deque<Place> placing_;
};

struct Backend {
  std::string_view name;
  // Both return null, with the reason in `why`, if this way does not work.
  std::unique_ptr<DataPath> (*at_source)(const Site& site, std::string& why);
  std::unique_ptr<DataPath> (*at_sink)(const Site& site, const Blob& offer, std::string& why);
  // Whether several connections are faster than one. False if a single core of this host copies anyway.
  bool striped = false;
  // Makes the state that this backend keeps, which takes as long as pinning the pool's memory. Null: no state.
  void (*prepare)(const FabricOptions& options, const Pool& pool, Fabrics& fabrics) = nullptr;
  // Whether it moves pools in CUDA memory, which host code must not touch.
  bool device = false;
  // Whether both ends must be on one host.
  bool local = false;
  // Whether the source has what this way needs: the pool, the adapter. Null: always. False is not a failure.
  bool (*fits)(const Site& site) = nullptr;
};

// The backends, one per file.
extern const Backend kCudaIpc;
extern const Backend kCudaPut;
extern const Backend kDirect;
extern const Backend kCma;
extern const Backend kRing;
extern const Backend kGpuDirect;
extern const Backend kVerbs;
extern const Backend kUcx;
extern const Backend kTcp;

// All backends of this build, the fastest first.
[[nodiscard]] std::span<const Backend* const> backends();
[[nodiscard]] const Backend* find_backend(std::string_view name);

}  // namespace baton::transfer
