// A reliable connection between two adapters: a queue pair that reads memory of the peer's.
//
//   created, address() ──▶ the peer     connect(its address) ──▶ reads are posted, poll() says which have ended
//
// Its destruction is a fence: the queue pair enters the error state, in which the adapter ends all pending work and
// reports that, and is then destroyed; afterwards nothing is written.
#pragma once

#include <sys/uio.h>

#include <deque>
#include <span>

#include "transfer/verbs_device.h"

namespace baton::transfer {

// Connection data for the peer, and parameters that must suit both.
struct VerbsAddress {
  std::uint32_t queue = 0;
  std::uint32_t first_packet = 0;
  std::uint16_t lid = 0;
  std::array<std::uint8_t, sizeof(ibv::Gid)> gid{};
  std::uint8_t link_layer = 0;
  std::uint8_t mtu = 0;
  std::uint8_t reads_served = 0;  // Concurrently.
  std::uint32_t message_bytes_max = 0;

  void put(class Writer& writer) const;
  void get(class Reader& reader);
};

class VerbsQueue {
 public:
  // Throws std::runtime_error. `reads`: this side's reads in flight at most; 0: it only serves.
  VerbsQueue(VerbsDevice& device, std::uint32_t reads);
  ~VerbsQueue();
  VerbsQueue(const VerbsQueue&) = delete;
  VerbsQueue& operator=(const VerbsQueue&) = delete;

  [[nodiscard]] const VerbsAddress& address() const { return address_; }
  // Throws std::runtime_error.
  void connect(const VerbsAddress& peer);
  // Readable when `poll` should be called.
  [[nodiscard]] int fd() const { return channel_ == nullptr ? -1 : channel_->fd; }

  [[nodiscard]] std::size_t room() const { return room_; }
  // Begins reads, at most as many as there is room for, that end together under `tag`. False: see `why`.
  [[nodiscard]] bool read(std::span<const iovec> local, std::uint32_t lkey, std::span<const iovec> remote,
                          std::uint32_t rkey, void* tag);
  struct Batch {
    void* tag = nullptr;
    std::size_t reads = 0;
  };
  // Appends the batches that have ended, in the order of their start. False: see `why`.
  [[nodiscard]] bool poll(std::vector<Batch>& ended);
  [[nodiscard]] const std::string& why() const { return why_; }
  [[nodiscard]] ibv::Qp* handle() const { return qp_; }

 private:
  void create(std::uint32_t reads);
  void modify(ibv::QpAttr attr, int mask, const char* what);
  void destroy();
  [[nodiscard]] bool take_completions(std::vector<Batch>* ended);

  VerbsDevice& device_;
  ibv::CompChannel* channel_ = nullptr;
  ibv::Cq* cq_ = nullptr;
  ibv::Qp* qp_ = nullptr;
  VerbsAddress address_;
  std::size_t room_ = 0;
  std::deque<Batch> under_way_;
  std::vector<ibv::SendWr> requests_;  // Kept to reuse its memory.
  std::vector<ibv::Sge> targets_;
  std::string why_;
};

}  // namespace baton::transfer
