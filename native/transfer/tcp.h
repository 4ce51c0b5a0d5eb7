// A non-blocking connection between two agents: their frames, and the chunks that travel inline among them.
//
// The kernel gathers payloads directly from the source's blocks and receives them directly into the sink's. No one uses
// the destination before PULL_DONE, so stale or corrupted bytes there do no harm, and a staging copy would only cost
// bandwidth.
#pragma once

#include <deque>
#include <optional>

#include "transfer/data_path.h"
#include "transfer/pool.h"
#include "transfer/wire.h"

namespace baton::transfer {

class Stream {
 public:
  Stream(int fd, ConnectionId connection, std::vector<Event>& happened);  // Owns `fd`.
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] bool wants_write() const { return !control_.empty() || !payloads_.empty(); }
  void allow_payloads(std::uint64_t bytes_max, bool checksum);

  // All return false once the connection is unusable; `why` then gives the reason.
  [[nodiscard]] bool send(Blob frame);
  [[nodiscard]] bool flush();
  // Reads available bytes from the socket, up to a bound. `more`: call again.
  [[nodiscard]] bool receive(bool& more);
  // Appends at most one batch of frames; stops after a data header until `place` or `discard`.
  [[nodiscard]] bool parse(std::vector<Event>& frames);
  [[nodiscard]] const std::string& why() const { return why_; }

  void serve(const Serve& chunk, std::vector<iovec> pieces, std::uint64_t bytes);
  void stop_serving(PullId pull);
  [[nodiscard]] bool place(const Place& chunk, std::vector<iovec> pieces);
  void discard();
  void stop_placing(PullId pull);

 private:
  struct Payload {
    Serve chunk;
    Blob header;
    std::vector<iovec> pieces;
    Blob copy;  // Present only for a chunk with injected corruption.
    std::uint32_t crc = 0;
    bool prepared = false;
    std::size_t piece = 0;        // The first piece not completely sent; the header is the first of all.
    std::size_t piece_bytes = 0;  // Sent of that piece.
    [[nodiscard]] bool on_the_way() const { return piece > 0 || piece_bytes > 0; }
  };
  struct Arriving {
    PullId pull = 0;
    std::uint32_t sequence = 0;
    std::uint64_t left_bytes = 0;
    bool decided = false;
    std::vector<iovec> pieces;  // Empty: thrown away.
    std::vector<iovec> rest;
  };

  [[nodiscard]] bool fail(std::string why);
  void prepare(Payload& payload);
  void sent(std::size_t bytes);
  void arrived(std::size_t bytes);
  void take_from_buffer();
  [[nodiscard]] bool receive_payload(bool& more);

  int fd_;
  ConnectionId connection_;
  std::vector<Event>& happened_;
  std::uint64_t payload_bytes_max_ = 0;
  bool checksum_ = true;
  std::string why_;

  std::deque<Blob> control_;  // Sent before payloads that have not begun.
  std::size_t control_sent_ = 0;
  std::size_t control_bytes_ = 0;
  std::deque<Payload> payloads_;

  Blob buffer_;
  std::size_t buffer_begin_ = 0;
  std::size_t buffer_end_ = 0;
  std::optional<Arriving> arriving_;
};

}  // namespace baton::transfer
