// Opening sockets, with every descriptor closed on each way out.
#pragma once

#include <cstdint>
#include <string>

namespace baton::transfer {

struct Listening {
  int fd = -1;
  std::string address;  // host:port with a numeric host, as others reach it.
};

// Throws std::invalid_argument for a host or std::system_error.
[[nodiscard]] Listening listen_on(const std::string& host, std::uint16_t port);
// Begins a connection; -1 and errno when that fails at once.
[[nodiscard]] int begin_connect(const std::string& address);
void tune(int fd);

}  // namespace baton::transfer
