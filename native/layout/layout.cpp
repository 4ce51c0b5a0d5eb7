#include "layout/layout.h"

#include <algorithm>
#include <array>
#include <charconv>

namespace baton::layout {
namespace {

constexpr std::array<std::string_view, 5> kDtypes = {"float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2"};
constexpr std::array<std::string_view, 2> kOrders = {"NHD", "HND"};
constexpr std::array<std::string_view, 3> kForms = {"split", "fused", "latent"};
constexpr std::array<std::string_view, 3> kPackings = {"plain", "vec", "amx"};

// Reads "key=value" pairs in the order in which `to_string` writes them.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text), rest_(text) {}

  std::uint32_t number(std::string_view key, char end = ' ') {
    std::uint32_t value = 0;
    const std::string_view word = take(key, end);
    const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc() || stop != word.data() + word.size()) fail();
    return value;
  }

  template <typename Name, std::size_t N>
  Name name(std::string_view key, const std::array<std::string_view, N>& names) {
    const auto found = std::find(names.begin(), names.end(), take(key, ' '));
    if (found == names.end()) fail();
    return static_cast<Name>(found - names.begin());
  }

  [[noreturn]] void fail() const {
    // It may come from a peer: neither its length nor its bytes are to be trusted in an error's text.
    std::string shown(text_.substr(0, 256));
    for (char& byte : shown) {
      if (byte < ' ' || byte > '~') byte = '?';
    }
    throw Invalid("'" + shown + "' does not describe a KV layout");
  }

 private:
  std::string_view take(std::string_view key, char end) {
    if (!rest_.starts_with(key)) fail();
    const std::size_t stop = std::min(rest_.find(end), rest_.size());
    const std::string_view word = rest_.substr(key.size(), stop - key.size());
    rest_.remove_prefix(std::min(stop + 1, rest_.size()));
    return word;
  }

  std::string_view text_;
  std::string_view rest_;
};

template <std::size_t N, typename Name>
bool known(const std::array<std::string_view, N>&, Name name) {
  return static_cast<std::size_t>(name) < N;
}

template <std::size_t N, typename Name>
std::string spelled(const std::array<std::string_view, N>& names, Name name) {
  return known(names, name) ? std::string(names[static_cast<std::size_t>(name)]) : "?";
}

void require(bool good, const Layout& layout, const char* why) {
  if (!good) throw Invalid("KV layout '" + to_string(layout) + "': " + why);
}

}  // namespace

void check(const Layout& layout) {
  for (const std::uint32_t extent :
       {layout.layers, layout.kv_heads, layout.dim, layout.block_tokens, layout.tp_size, layout.tp_rank + 1}) {
    require(extent >= 1 && extent <= kExtentMax, layout, "every size must be from 1 to 65536");
  }
  require(known(kDtypes, layout.dtype) && known(kOrders, layout.order) && known(kForms, layout.form) &&
              known(kPackings, layout.packing),
          layout, "unknown kind");
  require(layout.tp_rank < layout.tp_size, layout, "there is no such rank");
  if (layout.form == Form::latent) {
    require(layout.kv_heads == 1, layout, "latent rows have no heads: kv_heads must be 1");
  } else {
    require(layout.kv_heads % layout.tp_size == 0 || layout.tp_size % layout.kv_heads == 0, layout,
            "heads cannot be shared out evenly among the ranks");
  }
  if (layout.packing == Packing::plain) return;
  require(layout.form == Form::fused && layout.order == Order::hnd, layout, "packed blocks are fused and HND");
  if (layout.packing == Packing::amx) {
    require(element_bytes(layout.dtype) <= 2, layout, "amx packs elements of one or two bytes");
    require(layout.block_tokens % 16 == 0 && layout.dim % 16 == 0, layout, "amx packs tokens and dimensions by 16");
  }
}

std::string to_string(const Layout& layout) {
  return "layers=" + std::to_string(layout.layers) + " kv_heads=" + std::to_string(layout.kv_heads) +
         " dim=" + std::to_string(layout.dim) + " dtype=" + spelled(kDtypes, layout.dtype) +
         " order=" + spelled(kOrders, layout.order) + " form=" + spelled(kForms, layout.form) +
         " packing=" + spelled(kPackings, layout.packing) + " block_tokens=" + std::to_string(layout.block_tokens) +
         " tp=" + std::to_string(layout.tp_rank) + "/" + std::to_string(layout.tp_size);
}

Layout parse(std::string_view text) {
  Reader reader(text);
  Layout layout;
  layout.layers = reader.number("layers=");
  layout.kv_heads = reader.number("kv_heads=");
  layout.dim = reader.number("dim=");
  layout.dtype = reader.name<Dtype>("dtype=", kDtypes);
  layout.order = reader.name<Order>("order=", kOrders);
  layout.form = reader.name<Form>("form=", kForms);
  layout.packing = reader.name<Packing>("packing=", kPackings);
  layout.block_tokens = reader.number("block_tokens=");
  layout.tp_rank = reader.number("tp=", '/');
  layout.tp_size = reader.number("");
  // Each layout has one spelling: no leading zeros, nothing after the end.
  if (to_string(layout) != text) reader.fail();
  check(layout);
  return layout;
}

std::uint32_t element_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::float32:
      return 4;
    case Dtype::bfloat16:
    case Dtype::float16:
      return 2;
    case Dtype::float8_e4m3:
    case Dtype::float8_e5m2:
      return 1;
  }
  return 0;
}

Heads heads_of(const Layout& layout) {
  if (layout.form == Form::latent) return {0, 1};
  if (layout.kv_heads >= layout.tp_size) {
    const std::uint32_t count = layout.kv_heads / layout.tp_size;
    return {layout.tp_rank * count, count};
  }
  // More ranks than heads: neighbours hold the same one.
  return {layout.tp_rank / (layout.tp_size / layout.kv_heads), 1};
}

std::uint32_t tensors_of(const Layout& layout) {
  return layout.form == Form::split ? 2 : 1;
}

std::uint64_t block_bytes(const Layout& layout) {
  const std::uint64_t plane = std::uint64_t{heads_of(layout).count} * layout.block_tokens * layout.dim;
  return plane * element_bytes(layout.dtype) * (layout.form == Form::fused ? 2 : 1);
}

}  // namespace baton::layout
