// The use of UCX: a library, a context with the pool registered once per agent, and for each connection a worker of its
// own, which on the sink has one endpoint.
//
// A worker per connection takes some milliseconds to make, and its destruction is a fence: afterwards nothing of it is
// written. All calls come from the agent's thread, so none of them locks.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transfer/events.h"
#include "transfer/library.h"
#include "transfer/pool.h"
#include "transfer/ucx_abi.h"

namespace baton::transfer {

class UcxMemory;

// One agent's UCX context.
class UcxContext {
 public:
  // Does not throw if UCX is unusable: `check_usable` does.
  UcxContext(const FabricOptions& options, const Pool& pool);
  ~UcxContext();
  UcxContext(const UcxContext&) = delete;
  UcxContext& operator=(const UcxContext&) = delete;

  // Both throw std::runtime_error.
  void check_usable() const;
  void check(ucx::Status status, const char* what) const;
  // The pool's memory, registered with UCX.
  [[nodiscard]] const std::vector<UcxMemory>& layers() const { return layers_; }
  [[nodiscard]] std::string text(ucx::Status status) const { return calls.status_string(status); }

  ucx::Calls calls{};
  unsigned minor = 0;
  ucx::Context* context = nullptr;

 private:
  void open(const FabricOptions& options, const Pool& pool);
  void load(const std::string& name);

  std::vector<UcxMemory> layers_;
  std::string why_;
};

class UcxMemory {
 public:
  // Throws std::runtime_error.
  UcxMemory(const UcxContext& context, const void* begin, std::uint64_t bytes);
  UcxMemory(UcxMemory&& other) noexcept : context_(other.context_), memory_(std::exchange(other.memory_, nullptr)) {}
  UcxMemory& operator=(UcxMemory&&) = delete;
  ~UcxMemory();

  [[nodiscard]] ucx::Memory* handle() const { return memory_; }
  [[nodiscard]] Blob key() const;

 private:
  const UcxContext& context_;
  ucx::Memory* memory_ = nullptr;
};

class UcxWorker {
 public:
  // Throws std::runtime_error, as `address` and `connect` do.
  explicit UcxWorker(UcxContext& context);
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  [[nodiscard]] Blob address() const;
  // Readable when `progress` should be called, after `rest` returned true.
  [[nodiscard]] int fd() const { return fd_; }
  // Does one step; false: there was nothing to do.
  bool progress();
  // Requests a notification of the next event; false: one has happened already.
  [[nodiscard]] bool rest();

  // Sink: connects to the source's worker and takes its keys.
  void connect(const Blob& address, const std::vector<Blob>& keys);
  // Begins to read; `ended` is called with `tag` when it is done, from here or from `progress`. False: see `why`.
  [[nodiscard]] bool read(void* to, std::uint64_t from, std::size_t bytes, std::size_t key, const UcxMemory& memory,
                          void* tag);
  [[nodiscard]] std::size_t under_way() const { return under_way_.size(); }
  std::function<void(void* tag)> ended;
  // False after the peer failed or a read did.
  [[nodiscard]] bool good() const { return why_.empty(); }
  [[nodiscard]] const std::string& why() const { return why_; }
  // Transports of the reads, such as "rc_mlx5/mlx5_0:1"; empty if UCX does not report them.
  [[nodiscard]] std::string transports() const;

 private:
  // The data of a request.
  struct Get {
    UcxWorker* worker;
    void* tag;
    std::list<Get>::iterator self;
  };

  static void on_error(void* self, ucx::Endpoint*, ucx::Status status);
  static void on_read(void* request, ucx::Status status, void* get);
  void close();

  UcxContext& context_;
  ucx::Worker* worker_ = nullptr;
  ucx::Endpoint* endpoint_ = nullptr;
  bool watches_peer_ = false;
  bool stirs_ = false;  // There may be more to do after the last step.
  std::vector<ucx::RemoteKey*> keys_;
  int fd_ = -1;
  std::list<Get> under_way_;
  std::string why_;
};

}  // namespace baton::transfer
