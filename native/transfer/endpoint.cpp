#include "transfer/endpoint.h"

#include <charconv>
#include <cstdio>

namespace baton::transfer {

std::string format_endpoint(const Endpoint& endpoint) {
  char incarnation[17];
  std::snprintf(incarnation, sizeof incarnation, "%016llx", static_cast<unsigned long long>(endpoint.incarnation));
  return endpoint.address + "/" + incarnation;
}

std::optional<Endpoint> parse_endpoint(const std::string& text) {
  const auto slash = text.rfind('/');
  const auto colon = text.rfind(':', slash);
  if (slash == std::string::npos || colon == std::string::npos || colon == 0) return std::nullopt;
  const char* end = text.data() + text.size();
  Endpoint endpoint{.address = text.substr(0, slash)};
  const auto parsed = std::from_chars(text.data() + slash + 1, end, endpoint.incarnation, 16);
  std::uint16_t port = 0;
  const auto port_parsed = std::from_chars(text.data() + colon + 1, text.data() + slash, port);
  if (parsed.ec != std::errc{} || parsed.ptr != end || end - (text.data() + slash + 1) != 16) return std::nullopt;
  if (port_parsed.ec != std::errc{} || port_parsed.ptr != text.data() + slash || port == 0) return std::nullopt;
  return endpoint;
}

}  // namespace baton::transfer
