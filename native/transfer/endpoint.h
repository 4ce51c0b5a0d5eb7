// How an agent is named to others: "host:port/incarnation". Opaque outside this folder.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace baton::transfer {

struct Endpoint {
  std::string address;  // host:port
  std::uint64_t incarnation = 0;
};

[[nodiscard]] std::string format_endpoint(const Endpoint& endpoint);
[[nodiscard]] std::optional<Endpoint> parse_endpoint(const std::string& text);

}  // namespace baton::transfer
