#include "transfer/sockets.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <system_error>

namespace baton::transfer {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

struct HostPort {
  std::string host;
  std::string port;
};

HostPort split(const std::string& address) {
  const auto colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  return {host, address.substr(colon + 1)};
}

Addresses resolve(const std::string& host, const std::string& port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int status = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  return {status == 0 ? found : nullptr, &::freeaddrinfo};
}

std::string numeric(const sockaddr_storage& address, socklen_t size) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (::getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    throw std::invalid_argument("the address that was bound cannot be written down");
  }
  const std::string name = address.ss_family == AF_INET6 ? "[" + std::string(host) + "]" : host;
  return name + ":" + port;
}

bool unspecified(const addrinfo& found) {
  if (found.ai_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(found.ai_addr)->sin_addr.s_addr == INADDR_ANY;
  }
  return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(found.ai_addr)->sin6_addr);
}

}  // namespace

Listening listen_on(const std::string& address) {
  const auto [host, port] = split(address);
  const Addresses found = resolve(host, port, AI_PASSIVE);
  if (!found) throw std::invalid_argument("the host '" + host + "' has no address");
  // The address goes into the endpoint that others connect to, so it must mean this host to them.
  if (unspecified(*found)) throw std::invalid_argument("name an address of this host that others reach, not " + host);
  const int fd = ::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const auto fail = [&](const std::string& what) {
    const int error = errno;
    if (fd >= 0) ::close(fd);
    throw std::system_error(error, std::generic_category(), what);
  };
  if (fd < 0) fail("cannot make a socket");
  const int on = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(fd, found->ai_addr, found->ai_addrlen) != 0 || ::listen(fd, 256) != 0) {
    fail("cannot listen on " + address);
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0) fail("cannot read the port");
  return {fd, numeric(bound, size)};
}

int begin_connect(const std::string& address, const std::string& from) {
  // Numeric only: the progress thread must never wait for a name server.
  const auto [host, port] = split(address);
  const Addresses found = resolve(host, port, AI_NUMERICHOST);
  if (!found) {
    errno = EADDRNOTAVAIL;
    return -1;
  }
  const int fd = ::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const Addresses own = resolve(split(from).host, "0", AI_NUMERICHOST);
  const bool bound = from.empty() || (own && ::bind(fd, own->ai_addr, own->ai_addrlen) == 0);
  if (!bound || (::connect(fd, found->ai_addr, found->ai_addrlen) != 0 && errno != EINPROGRESS)) {
    const int error = errno;
    ::close(fd);
    errno = error;
    return -1;
  }
  return fd;
}

void tune(int fd) {
  const int on = 1, idle_s = 10, interval_s = 5, probes = 3;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  // A peer whose host vanished sends no end; the kernel finds out, so that its connection does not stay for ever.
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  // What is not acknowledged is repeated for a quarter of an hour, and meanwhile nothing is probed.
  const unsigned unacknowledged_ms = (idle_s + probes * interval_s) * 1000;
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged_ms, sizeof unacknowledged_ms);
}

}  // namespace baton::transfer
