#include "transfer/tcp.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "hash/crc32c.h"

namespace baton::transfer {
namespace {

constexpr std::size_t kBufferBytes = kFrameBytesMax + kLengthBytes;
constexpr std::size_t kControlBytesMax = 8 << 20;  // Unsent frames for a peer that does not read.
constexpr std::size_t kPiecesPerCall = 256;
constexpr std::size_t kBytesPerCall = 4 << 20;  // After so many, other connections get their turn.

std::uint32_t checksum_of(std::span<const iovec> pieces) {
  std::uint32_t crc = 0;
  for (const iovec& piece : pieces) crc = crc32c(crc, piece.iov_base, piece.iov_len);
  return crc;
}

}  // namespace

Stream::Stream(int fd, ConnectionId connection, std::vector<Event>& happened)
    : fd_(fd), connection_(connection), happened_(happened), buffer_(kBufferBytes) {}

Stream::~Stream() {
  ::close(fd_);
}

void Stream::allow_payloads(std::uint64_t bytes_max, bool checksum) {
  payload_bytes_max_ = bytes_max;
  checksum_ = checksum;
}

bool Stream::fail(std::string why) {
  why_ = std::move(why);
  return false;
}

// ---------------------------------------------------------------- out

bool Stream::send(Blob frame) {
  control_bytes_ += frame.size();
  if (control_bytes_ > kControlBytesMax) return fail("the peer does not read what it is sent");
  control_.push_back(std::move(frame));
  return true;
}

void Stream::serve(const Serve& chunk, std::vector<iovec> pieces, std::uint64_t bytes) {
  payloads_.push_back(Payload{
      .chunk = chunk, .header = encode(frames::Data{chunk.pull, chunk.sequence, bytes}), .pieces = std::move(pieces)});
}

void Stream::stop_serving(PullId pull) {
  std::erase_if(payloads_, [&](const Payload& payload) { return payload.chunk.pull == pull && !payload.on_the_way(); });
}

void Stream::prepare(Payload& payload) {
  payload.prepared = true;
  if (checksum_) payload.crc = checksum_of(payload.pieces);
  if (payload.chunk.corruption != Corruption::none) {
    for (const iovec& piece : payload.pieces) {
      const auto* at = static_cast<const std::uint8_t*>(piece.iov_base);
      payload.copy.insert(payload.copy.end(), at, at + piece.iov_len);
    }
    corrupt(payload.copy, payload.chunk.corruption);
    payload.pieces = {{payload.copy.data(), payload.copy.size()}};
    if (checksum_ && payload.chunk.before_checksum) payload.crc = checksum_of(payload.pieces);
  }
  payload.pieces.insert(payload.pieces.begin(), {payload.header.data(), payload.header.size()});
}

bool Stream::flush() {
  std::size_t budget = kBytesPerCall;
  while (wants_write()) {
    iovec pieces[kPiecesPerCall];
    std::size_t count = 0, size = 0;
    const auto add = [&](void* at, std::size_t bytes) {
      pieces[count++] = {at, bytes};
      size += bytes;
    };
    // A payload on the way goes on; else control frames go first, and a payload only behind the last of them.
    const bool on_the_way = !payloads_.empty() && payloads_.front().on_the_way();
    for (std::size_t i = 0; !on_the_way && i < control_.size() && count < kPiecesPerCall; ++i) {
      const std::size_t skip = i == 0 ? control_sent_ : 0;
      add(control_[i].data() + skip, control_[i].size() - skip);
    }
    if (!payloads_.empty() && (on_the_way || count == control_.size())) {
      Payload& payload = payloads_.front();
      if (!payload.prepared) prepare(payload);
      for (std::size_t i = payload.piece; i < payload.pieces.size() && count < kPiecesPerCall; ++i) {
        const std::size_t skip = i == payload.piece ? payload.piece_bytes : 0;
        add(static_cast<std::uint8_t*>(payload.pieces[i].iov_base) + skip, payload.pieces[i].iov_len - skip);
      }
    }
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = count;
    const ssize_t taken = ::sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (taken < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return true;
      return fail(std::strerror(errno));
    }
    const auto bytes = static_cast<std::size_t>(taken);
    sent(bytes);
    if (bytes < size || bytes >= budget) return true;
    budget -= bytes;
  }
  return true;
}

void Stream::sent(std::size_t bytes) {
  const bool on_the_way = !payloads_.empty() && payloads_.front().on_the_way();
  while (!on_the_way && bytes > 0 && !control_.empty()) {
    const std::size_t rest = control_.front().size() - control_sent_;
    const std::size_t taken = std::min(bytes, rest);
    bytes -= taken;
    control_sent_ += taken;
    if (taken < rest) break;
    control_bytes_ -= control_.front().size();
    control_.pop_front();
    control_sent_ = 0;
  }
  if (bytes == 0) return;
  Payload& payload = payloads_.front();
  while (bytes > 0) {
    const std::size_t rest = payload.pieces[payload.piece].iov_len - payload.piece_bytes;
    const std::size_t taken = std::min(bytes, rest);
    bytes -= taken;
    payload.piece_bytes += taken;
    if (taken < rest) break;
    ++payload.piece;
    payload.piece_bytes = 0;
  }
  if (payload.piece < payload.pieces.size()) return;
  happened_.push_back(Served{connection_, payload.chunk.pull, payload.chunk.sequence, -1, payload.crc});
  payloads_.pop_front();
}

// ---------------------------------------------------------------- in

bool Stream::receive(bool& more) {
  more = false;
  if (arriving_) return arriving_->decided ? receive_payload(more) : true;
  if (buffer_begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + buffer_begin_, buffer_end_ - buffer_begin_);
    buffer_end_ -= buffer_begin_;
    buffer_begin_ = 0;
  }
  const ssize_t taken = ::recv(fd_, buffer_.data() + buffer_end_, buffer_.size() - buffer_end_, MSG_DONTWAIT);
  if (taken == 0) return fail("the peer closed the connection");
  if (taken < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || fail(std::strerror(errno));
  buffer_end_ += static_cast<std::size_t>(taken);
  more = buffer_end_ == buffer_.size();  // If not, that was all, and epoll reports more.
  return true;
}

bool Stream::receive_payload(bool& more) {
  std::array<std::uint8_t, 64 << 10> waste;
  iovec nowhere{waste.data(), std::min<std::size_t>(waste.size(), arriving_->left_bytes)};
  msghdr message{};
  message.msg_iov = arriving_->pieces.empty() ? &nowhere : arriving_->rest.data();
  message.msg_iovlen = arriving_->pieces.empty() ? 1 : std::min(arriving_->rest.size(), kPiecesPerCall);
  const ssize_t taken = ::recvmsg(fd_, &message, MSG_DONTWAIT);
  if (taken == 0) return fail("the peer closed the connection");
  if (taken < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || fail(std::strerror(errno));
  more = true;
  arrived(static_cast<std::size_t>(taken));
  return true;
}

// Accounts for payload bytes that lie where they belong.
void Stream::arrived(std::size_t bytes) {
  Arriving& payload = *arriving_;
  payload.left_bytes -= bytes;
  std::size_t whole = 0;
  while (bytes > 0 && whole < payload.rest.size()) {
    iovec& piece = payload.rest[whole];
    const std::size_t taken = std::min(bytes, piece.iov_len);
    bytes -= taken;
    piece.iov_base = static_cast<std::uint8_t*>(piece.iov_base) + taken;
    piece.iov_len -= taken;
    if (piece.iov_len == 0) ++whole;
  }
  payload.rest.erase(payload.rest.begin(), payload.rest.begin() + static_cast<std::ptrdiff_t>(whole));
  if (payload.left_bytes > 0) return;
  if (!payload.pieces.empty()) {
    const std::uint32_t crc = checksum_ ? checksum_of(payload.pieces) : 0;
    happened_.push_back(Placed{connection_, payload.pull, payload.sequence, -1, crc});
  }
  arriving_.reset();
}

// The receive buffer may hold the first bytes of a payload already.
void Stream::take_from_buffer() {
  while (arriving_ && buffer_begin_ < buffer_end_) {
    std::size_t bytes = std::min<std::size_t>(buffer_end_ - buffer_begin_, arriving_->left_bytes);
    if (!arriving_->rest.empty()) {
      bytes = std::min(bytes, arriving_->rest.front().iov_len);
      std::memcpy(arriving_->rest.front().iov_base, buffer_.data() + buffer_begin_, bytes);
    }
    buffer_begin_ += bytes;
    arrived(bytes);
  }
}

bool Stream::parse(std::vector<Event>& frames) {
  while (!arriving_ && buffer_end_ - buffer_begin_ >= kLengthBytes) {
    const std::uint8_t* at = buffer_.data() + buffer_begin_;
    std::uint32_t length = 0;
    Reader(Bytes(at, kLengthBytes)).get(length);
    if (length == 0 || length > kFrameBytesMax) return fail("the peer sent a frame of impossible length");
    if (buffer_end_ - buffer_begin_ < kLengthBytes + length) return true;
    const Bytes frame(at + kLengthBytes, length);
    buffer_begin_ += kLengthBytes + length;
    if (frame[0] != static_cast<std::uint8_t>(FrameType::data)) {
      frames.push_back(FrameArrived{connection_, Blob(frame.begin(), frame.end())});
      continue;
    }
    const auto data = decode<frames::Data>(frame.subspan(1));
    if (!data || data->bytes == 0 || data->bytes > payload_bytes_max_) {
      return fail("the peer announced a payload of impossible length");
    }
    arriving_ = Arriving{.pull = data->pull, .sequence = data->sequence, .left_bytes = data->bytes};
    frames.push_back(DataArrived{connection_, data->pull, data->sequence, data->bytes});
  }
  return true;
}

bool Stream::place(const Place& chunk, std::vector<iovec> pieces) {
  if (!arriving_ || arriving_->decided || chunk.slot >= 0) return false;
  arriving_->decided = true;
  arriving_->rest = pieces;
  arriving_->pieces = std::move(pieces);
  take_from_buffer();
  return true;
}

void Stream::discard() {
  if (!arriving_ || arriving_->decided) return;
  arriving_->decided = true;
  take_from_buffer();
}

void Stream::stop_placing(PullId pull) {
  if (!arriving_ || arriving_->pull != pull || !arriving_->decided) return;
  arriving_->pieces.clear();
  arriving_->rest.clear();
}

// ---------------------------------------------------------------- the backend

namespace {

class InlinePath : public DataPath {
 public:
  explicit InlinePath(const Site& site) : site_(site) {}
  void use(bool checksum) override { site_.stream.allow_payloads(site_.chunk_bytes_max, checksum); }
  void serve(const Serve& chunk) override {
    site_.stream.serve(chunk, site_.pool.pieces(chunk.layer, chunk.blocks),
                       chunk.blocks.size() * site_.pool.block_bytes);
  }
  void stop_serving(PullId pull) override { site_.stream.stop_serving(pull); }
  bool place(const Place& chunk) override {
    return site_.stream.place(chunk, site_.pool.pieces(chunk.layer, chunk.blocks));
  }
  void stop_placing(PullId pull) override { site_.stream.stop_placing(pull); }

 private:
  Site site_;
};

}  // namespace

const Backend kTcp{
    "tcp",
    [](const Site& site, std::string&) -> std::unique_ptr<DataPath> { return std::make_unique<InlinePath>(site); },
    [](const Site& site, const Blob&, std::string&) -> std::unique_ptr<DataPath> {
      return std::make_unique<InlinePath>(site);
    },
    true};

}  // namespace baton::transfer
