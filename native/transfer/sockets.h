// Opening sockets, with every descriptor closed on each way out.
#pragma once

#include <cstdint>
#include <string>

namespace baton::transfer {

struct Listening {
  int fd = -1;
  std::string address;  // host:port with a numeric host, as others reach it.
};

// `address`: host:port, an IPv6 host in brackets. Throws std::invalid_argument for a host or std::system_error.
[[nodiscard]] Listening listen_on(const std::string& address);
// Begins a connection, from the host of the address `from` if that is not empty; -1 and errno when that fails at once.
[[nodiscard]] int begin_connect(const std::string& address, const std::string& from);
void tune(int fd);

}  // namespace baton::transfer
