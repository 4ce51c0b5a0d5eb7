// Texts of peers: endpoints, and layouts as they travel in fingerprints.
#include "fuzz/input.h"
#include "layout/layout.h"
#include "transfer/endpoint.h"

using namespace baton;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  if (const auto endpoint = transfer::parse_endpoint(text)) {
    const std::string formatted = transfer::format_endpoint(*endpoint);
    const auto again = transfer::parse_endpoint(formatted);
    fuzz::require(again && transfer::format_endpoint(*again) == formatted &&
                  again->incarnation == endpoint->incarnation);
  }
  try {
    const layout::Layout got = layout::parse(text);
    fuzz::require(layout::to_string(layout::parse(layout::to_string(got))) == layout::to_string(got));
  } catch (const layout::Invalid&) {
  }
  return 0;
}
