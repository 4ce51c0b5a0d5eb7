// An agent's endpoint: its rails and its incarnation, "host:port[@label][~distance],.../incarnation". Opaque outside
// this folder. What follows a '|' is for agents around this one, see baton/pool/gpu_agent.py.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace baton::transfer {

inline constexpr std::size_t kRailsMax = 16;

// One address of an agent.
struct Rail {
  std::string address;         // host:port
  std::string label;           // Letters, digits, '_', '.' and '-'; may be empty.
  std::uint32_t distance = 0;  // The nearest working rails carry all; farther ones take over when those are lost.
  [[nodiscard]] const std::string& name() const { return label.empty() ? address : label; }
};

struct Endpoint {
  std::vector<Rail> rails;
  std::uint64_t incarnation = 0;
};

// Both return nothing for malformed text; port 0 is for listening only.
[[nodiscard]] std::optional<Rail> parse_rail(const std::string& text, bool listening);
[[nodiscard]] std::optional<Endpoint> parse_endpoint(const std::string& text);
[[nodiscard]] std::string format_endpoint(const Endpoint& endpoint);

}  // namespace baton::transfer
