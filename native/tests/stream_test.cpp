// A connection by itself: frames and payloads that are cut anywhere, stopped, too long, or unrequested.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <numeric>

#include "hash/crc32c.h"
#include "tests/check.h"
#include "transfer/sockets.h"
#include "transfer/tcp.h"

using namespace baton::transfer;

namespace {

constexpr std::uint64_t kPayloadMax = 1 << 20;

struct Ends {
  Ends() {
    sink.allow_payloads(kPayloadMax, true);
    source.allow_payloads(kPayloadMax, true);
  }
  // Delivers what there is; places or discards payloads as they come, as `where` says. False: a side gave up.
  bool run() {
    for (int idle = 0; idle < 3; ++idle) {
      if (source.wants_write() && !source.flush()) return false;
      for (bool more = true; more;) {
        if (!sink.receive(more)) return false;
        std::vector<Event> frames;
        if (!sink.parse(frames)) return false;
        for (const Event& event : frames) {
          idle = 0;
          received.push_back(event);
          const auto* data = std::get_if<DataArrived>(&event);
          if (data == nullptr) continue;
          if (where.empty()) {
            sink.discard();
          } else if (!sink.place(
                         {.connection = 2, .pull = data->pull, .sequence = data->sequence},
                         {{where.data(), where.size() / 2}, {where.data() + where.size() / 2, where.size() / 2}})) {
            return false;
          }
        }
        more = more || !frames.empty();
        if (more) idle = 0;
      }
    }
    return true;
  }
  void serve(PullId pull, std::vector<std::uint8_t>& bytes) {
    source.serve({.connection = 1, .pull = pull}, {{bytes.data(), bytes.size()}}, bytes.size());
  }
  // The pulls and slots of all frames in the order they came; payloads are negative.
  std::vector<std::int64_t> order() const {
    std::vector<std::int64_t> said;
    for (const Event& event : received) {
      if (const auto* data = std::get_if<DataArrived>(&event)) said.push_back(-static_cast<std::int64_t>(data->pull));
      if (const auto* frame = std::get_if<FrameArrived>(&event)) {
        said.push_back(
            static_cast<std::int64_t>(decode<frames::KeepAlive>(baton::Bytes(frame->frame).subspan(1))->pull));
      }
    }
    return said;
  }

  std::array<int, 2> fds = [] {
    std::array<int, 2> made{};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, made.data()) != 0) throw std::runtime_error("no sockets");
    return made;
  }();
  std::vector<Event> at_source, at_sink, received;
  std::vector<std::uint8_t> where;
  Stream source{fds[0], 1, at_source}, sink{fds[1], 2, at_sink};
};

std::vector<std::uint8_t> pattern(std::size_t size) {
  std::vector<std::uint8_t> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(i * 7 + i / 251);
  return bytes;
}

// Bytes that a peer without authentication writes to the socket, and whether the stream still reads them.
bool takes(const Blob& bytes, bool agreed = true) {
  Ends ends;
  if (!agreed) ends.sink.allow_payloads(0, true);
  CHECK(::send(ends.fds[0], bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  return ends.run();
}

}  // namespace

TEST(streams_find_frames_however_they_are_cut) {
  Blob all;
  for (const PullId pull : {1u, 2u, 3u}) {
    const Blob frame = encode(frames::KeepAlive{pull});
    all.insert(all.end(), frame.begin(), frame.end());
  }
  for (std::size_t part = 1; part <= all.size(); ++part) {
    Ends ends;
    for (std::size_t at = 0; at < all.size(); at += part) {
      CHECK(::send(ends.fds[0], all.data() + at, std::min(part, all.size() - at), 0) > 0);
      CHECK(ends.run());
    }
    CHECK(ends.order() == std::vector<std::int64_t>({1, 2, 3}));
  }
}

TEST(streams_refuse_impossible_lengths) {
  CHECK(takes({1, 0, 0, 0, 1}));
  CHECK(!takes({0, 0, 0, 0}) && !takes({0, 0, 0, 0x7F}));
  CHECK(takes(encode(frames::Data{1, 1, kPayloadMax})));
  CHECK(!takes(encode(frames::Data{1, 1, kPayloadMax + 1})) && !takes(encode(frames::Data{1, 1, 0})));
  CHECK(!takes(encode(frames::Data{1, 1, 1}), false));
}

TEST(streams_carry_payloads_and_frames_without_mixing_them) {
  auto bytes = pattern(kPayloadMax);  // More than a socket's buffer holds.
  Ends ends;
  ends.where.resize(bytes.size());
  ends.serve(1, bytes);
  CHECK(ends.source.send(encode(frames::KeepAlive{5})) && ends.source.flush());
  CHECK(ends.at_source.empty());  // It has not all been read.
  CHECK(ends.source.send(encode(frames::KeepAlive{6})));
  ends.serve(2, bytes);
  ends.source.stop_serving(2);
  ends.source.stop_serving(1);  // Too late: it is on its way.
  CHECK(ends.run());
  CHECK(ends.order() == std::vector<std::int64_t>({5, -1, 6}) && ends.where == bytes);
  const std::uint32_t crc = baton::crc32c_portable(0, bytes.data(), bytes.size());
  CHECK(ends.at_source.size() == 1 && std::get<Served>(ends.at_source[0]).crc == crc);
  CHECK(ends.at_sink.size() == 1 && std::get<Placed>(ends.at_sink[0]).crc == crc);
}

TEST(streams_write_nothing_of_a_payload_that_was_stopped) {
  auto bytes = pattern(kPayloadMax);
  Ends ends;
  ends.serve(1, bytes);
  CHECK(ends.source.flush() && ends.source.wants_write());
  std::vector<Event> frames;
  for (bool more = true; frames.empty() && more;) CHECK(ends.sink.receive(more) && ends.sink.parse(frames));
  auto memory = std::make_unique<std::vector<std::uint8_t>>(bytes.size());
  const Place place{.connection = 2, .pull = 1};
  CHECK(ends.sink.place(place, {{memory->data(), memory->size()}}));
  CHECK(!ends.sink.place(place, {{memory->data(), memory->size()}}));
  ends.sink.stop_placing(1);
  memory->assign(memory->size(), 0xEE);  // It belongs to another owner from here on.
  CHECK(ends.source.send(encode(frames::KeepAlive{5})) && ends.run());
  CHECK(*memory == std::vector<std::uint8_t>(memory->size(), 0xEE));
  CHECK(ends.at_sink.empty() && ends.order() == std::vector<std::int64_t>({5}));
}

TEST(streams_spoil_a_payload_after_it_was_summed_or_before) {
  for (const Corruption corruption : {Corruption::flip, Corruption::zero, Corruption::shift}) {
    for (const bool before : {false, true}) {
      auto bytes = pattern(1000);
      Ends ends;
      ends.where.resize(bytes.size());
      ends.source.serve({.connection = 1, .pull = 1, .corruption = corruption, .before_checksum = before},
                        {{bytes.data(), bytes.size()}}, bytes.size());
      CHECK(ends.run() && ends.where != bytes && bytes == pattern(1000));
      CHECK((std::get<Served>(ends.at_source[0]).crc == std::get<Placed>(ends.at_sink[0]).crc) == before);
    }
  }
}

TEST(corrupted_bytes_are_what_they_are_said_to_be) {
  std::vector<std::uint8_t> bytes(100), few = {1, 2, 3, 4, 5};
  std::iota(bytes.begin(), bytes.end(), std::uint8_t{1});
  corrupt(bytes, Corruption::shift);
  CHECK(bytes.front() == 65 && bytes[35] == 100 && bytes[36] == 1 && bytes.back() == 64);
  corrupt(few, Corruption::shift);
  CHECK(few == std::vector<std::uint8_t>({3, 4, 5, 1, 2}));
  corrupt(few, Corruption::flip);
  CHECK(few == std::vector<std::uint8_t>({3, 4, 5 ^ 0x10, 1, 2}));
  corrupt(few, Corruption::none);
  CHECK(few[0] == 3);
  corrupt(few, Corruption::zero);
  CHECK(few == std::vector<std::uint8_t>(5));
}

TEST(streams_do_not_wait_for_ever_for_a_peer_that_does_not_read) {
  Ends ends;
  const Blob frame = encode(frames::Refuse{.detail = std::string(1000, 'x')});
  std::size_t sent = 0;
  while (sent < 100'000 && ends.source.send(frame)) CHECK(ends.source.flush() && ++sent > 0);
  CHECK(sent > 1000 && sent < 100'000);
}

TEST(streams_find_the_frame_behind_a_payload_that_nobody_wants) {
  auto bytes = pattern(100);
  Ends ends;
  ends.serve(3, bytes);
  CHECK(ends.source.flush() && ends.source.send(encode(frames::KeepAlive{5})) && ends.run());
  CHECK(ends.order() == std::vector<std::int64_t>({-3, 5}) && ends.at_sink.empty());
}

// What was sent to a host that vanished is unacknowledged, which stops the probes that would find that out.
TEST(a_connection_ends_when_nothing_is_acknowledged) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  tune(fd);
  unsigned timeout_ms = 0;
  socklen_t size = sizeof timeout_ms;
  const bool known = ::getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, &size) == 0;
  ::close(fd);
  CHECK(known && timeout_ms == 25'000);
}
