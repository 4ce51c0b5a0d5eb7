#include "transfer/endpoint.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

namespace baton::transfer {
namespace {

constexpr std::size_t kLabelCharsMax = 32;
constexpr std::string_view kLabelChars = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-";

template <class Number>
bool parse_number(std::string_view text, Number& number, int base = 10) {
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number, base);
  return parsed.ec == std::errc{} && parsed.ptr == text.data() + text.size();
}

// Takes what follows the last `mark` off the text.
std::optional<std::string> cut(std::string& text, char mark) {
  const auto at = text.rfind(mark);
  if (at == std::string::npos) return std::nullopt;
  std::string rest = text.substr(at + 1);
  text.resize(at);
  return rest;
}

}  // namespace

std::optional<Rail> parse_rail(const std::string& text, bool listening) {
  Rail rail{.address = text};
  std::uint8_t distance = 0;
  const auto far = cut(rail.address, '~');
  if (far && !parse_number(*far, distance)) return std::nullopt;
  rail.distance = distance;
  if (const auto label = cut(rail.address, '@')) {
    const bool good = !label->empty() && label->size() <= kLabelCharsMax &&
                      label->find_first_not_of(kLabelChars) == std::string::npos;
    if (!good) return std::nullopt;
    rail.label = *label;
  }
  const auto colon = rail.address.rfind(':');
  std::uint16_t port = 0;
  if (colon == std::string::npos || colon == 0 || rail.address.find_first_of(",/~@") != std::string::npos ||
      !parse_number(std::string_view(rail.address).substr(colon + 1), port) || (port == 0 && !listening)) {
    return std::nullopt;
  }
  return rail;
}

std::optional<Endpoint> parse_endpoint(const std::string& text) {
  Endpoint endpoint;
  std::string rails = text.substr(0, text.find('|'));
  const auto life = cut(rails, '/');
  if (!life || life->size() != 16 || !parse_number(*life, endpoint.incarnation, 16)) return std::nullopt;
  for (std::size_t begin = 0; begin <= rails.size();) {
    const std::size_t end = std::min(rails.find(',', begin), rails.size());
    auto rail = parse_rail(rails.substr(begin, end - begin), false);
    if (!rail || endpoint.rails.size() == kRailsMax) return std::nullopt;
    endpoint.rails.push_back(std::move(*rail));
    begin = end + 1;
  }
  return endpoint;
}

std::string format_endpoint(const Endpoint& endpoint) {
  std::string text;
  for (const Rail& rail : endpoint.rails) {
    if (!text.empty()) text += ',';
    text += rail.address;
    if (!rail.label.empty()) text.append("@").append(rail.label);
    if (rail.distance > 0) text.append("~").append(std::to_string(rail.distance));
  }
  char incarnation[17];
  std::snprintf(incarnation, sizeof incarnation, "%016llx", static_cast<unsigned long long>(endpoint.incarnation));
  return text + "/" + incarnation;
}

}  // namespace baton::transfer
