// Functions that open sockets and close every descriptor on failure.
#pragma once

#include <cstdint>
#include <string>

namespace baton::transfer {

struct Listening {
  int fd = -1;
  std::string address;  // host:port with a numeric host that others can reach.
};

// `address`: host:port, an IPv6 host in brackets. Throws std::invalid_argument for a host or std::system_error.
[[nodiscard]] Listening listen_on(const std::string& address);
// Begins a connection, from the host of the address `from` unless that is empty; -1 and errno if it fails at once.
[[nodiscard]] int begin_connect(const std::string& address, const std::string& from);
void tune(int fd);

}  // namespace baton::transfer
