// A reliable connection between two adapters: a queue pair that reads memory of the peer's.
//
//   created, address() ──▶ the peer     connect(its address) ──▶ reads are posted, poll() says which have ended
//
// Destroying it is a fence: it goes to the error state, where the adapter ends whatever it still does and says so, and
// is then destroyed; afterwards nothing is written any more.
#pragma once

#include <sys/uio.h>

#include <deque>
#include <span>

#include "transfer/verbs_device.h"

namespace baton::transfer {

// What the peer needs to connect, and what must suit both.
struct VerbsAddress {
  std::uint32_t queue = 0;
  std::uint32_t first_packet = 0;
  std::uint16_t lid = 0;
  std::array<std::uint8_t, sizeof(ibv::Gid)> gid{};
  std::uint8_t link_layer = 0;
  std::uint8_t mtu = 0;
  std::uint8_t reads_served = 0;  // At the same time.
  std::uint32_t message_bytes_max = 0;

  void put(class Writer& writer) const;
  void get(class Reader& reader);
};

class VerbsQueue {
 public:
  // Throws std::runtime_error. `reads`: that this side will have under way; 0: it only serves.
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
  // Begins reads, at most as many as there is room for, which end together under `tag`. False: see `why`.
  [[nodiscard]] bool read(std::span<const iovec> local, std::uint32_t lkey, std::span<const iovec> remote,
                          std::uint32_t rkey, void* tag);
  struct Batch {
    void* tag = nullptr;
    std::size_t reads = 0;
  };
  // Adds batches that have ended, in the order of their beginning. False: see `why`.
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
  std::vector<ibv::SendWr> requests_;  // Kept for their memory.
  std::vector<ibv::Sge> targets_;
  std::string why_;
};

}  // namespace baton::transfer
