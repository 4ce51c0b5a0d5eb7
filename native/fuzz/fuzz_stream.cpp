// The bytes of a connection, cut anywhere: frames, headers of payloads and payloads.
#include <sys/socket.h>
#include <unistd.h>

#include "fuzz/input.h"
#include "transfer/tcp.h"

using namespace baton::fuzz;

namespace {

constexpr std::uint64_t kPayloadMax = 4096;

// Takes a payload into memory of just its size, so that one byte too many is noticed.
struct Taken {
  std::vector<std::uint8_t> memory;
  Place chunk;
};

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  int sockets[2];
  require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, sockets) == 0);
  std::vector<Event> happened;
  Stream stream(sockets[0], 2, happened);
  stream.allow_payloads(kPayloadMax, input.byte() % 2 == 0);
  std::vector<std::unique_ptr<Taken>> taken;
  bool good = true;
  while (good && !input.empty()) {
    const Blob part = input.blob(input.byte());
    if (::send(sockets[1], part.data(), part.size(), MSG_NOSIGNAL) < 0) break;
    for (bool more = true; good && more;) {
      good = stream.receive(more);
      while (good) {
        happened.clear();
        good = stream.parse(happened);
        if (happened.empty()) break;
        for (const Event& event : std::vector<Event>(happened)) {
          const auto* arrived = std::get_if<DataArrived>(&event);
          if (arrived == nullptr) continue;
          require(arrived->bytes > 0 && arrived->bytes <= kPayloadMax);
          const std::uint8_t choice = input.byte();
          if (choice % 4 == 0) {
            stream.discard();
            continue;
          }
          auto& into = taken.emplace_back(std::make_unique<Taken>());
          into->memory.resize(arrived->bytes);
          into->chunk = {.connection = 2, .pull = arrived->pull, .sequence = arrived->sequence};
          const std::size_t first = arrived->bytes > 1 ? choice % arrived->bytes : 0;
          std::vector<iovec> pieces = {{into->memory.data() + first, arrived->bytes - first}};
          if (first > 0) pieces.push_back({into->memory.data(), first});
          good = stream.place(into->chunk, std::move(pieces));
          if (choice % 4 == 1) {
            stream.stop_placing(arrived->pull);
            into->memory = {};  // It must not be written any more.
          }
        }
      }
    }
  }
  ::close(sockets[1]);
  return 0;
}
