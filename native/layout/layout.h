// Layouts of paged KV cache blocks, so that caches with different layouts can exchange tokens.
//
// A Layout describes what one tensor-parallel rank holds; it has no addresses. Its text form is canonical, travels in
// handshakes and names a layout in every refusal:
//
//   layers=32 kv_heads=8 dim=128 dtype=bfloat16 order=HND form=fused packing=vec block_tokens=32 tp=0/2
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace baton::layout {

// A descriptor, range or pool that is invalid in itself.
struct Invalid : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// Two layouts that cannot be converted into each other; the text names both in full.
struct Mismatch : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// Elements are moved, never changed, so a float8 cache also needs equal scales on both sides, which its owner compares.
enum class Dtype : std::uint8_t { float32, bfloat16, float16, float8_e4m3, float8_e5m2 };

// The order within a plain block. With one head both are the same.
enum class Order : std::uint8_t {
  nhd,  // [token][head][dim]
  hnd,  // [head][token][dim]
};

enum class Form : std::uint8_t {
  split,   // K and V in separate tensors.
  fused,   // One tensor: K and V of a token and head side by side, or of a head where the block is packed.
  latent,  // One tensor, one row per token and no heads: MLA. Every rank holds all of it.
};

// The inside of a head's part of a block.
enum class Packing : std::uint8_t {
  plain,
  vec,  // vLLM on CPU: K [dim][token], then V [token][dim].
  amx,  // vLLM on CPU with AMX: K [token / 16][dim / 2][16][2 dims], then V [dim / 16][token / 2][16][2 tokens].
};

// Bounds that keep every product of sizes within 64 bits, whatever a peer says.
inline constexpr std::uint32_t kExtentMax = 1u << 16;  // Limit of layers, heads, dim, tokens per block and ranks.
inline constexpr std::uint32_t kTokensMax = 1u << 24;  // Limit of a sequence.

struct Layout {
  std::uint32_t layers = 0;
  std::uint32_t kv_heads = 0;  // Heads of the whole model; 1 if the form is latent.
  std::uint32_t dim = 0;       // Elements of one head's K and of its V; elements of a row if the form is latent.
  Dtype dtype{};
  Order order{};
  Form form{};
  Packing packing{};
  std::uint32_t block_tokens = 0;
  std::uint32_t tp_rank = 0;
  std::uint32_t tp_size = 1;

  bool operator==(const Layout&) const = default;
};

// Heads [first, first + count) of the whole model.
struct Heads {
  std::uint32_t first = 0;
  std::uint32_t count = 0;

  bool operator==(const Heads&) const = default;
};

void check(const Layout& layout);  // Throws Invalid.
[[nodiscard]] std::string to_string(const Layout& layout);
[[nodiscard]] Layout parse(std::string_view text);  // Accepts what `to_string` writes; throws Invalid.

[[nodiscard]] std::uint32_t element_bytes(Dtype dtype);
[[nodiscard]] Heads heads_of(const Layout& layout);
// Number of tensors of a layer's cache: two for K and V, or one.
[[nodiscard]] std::uint32_t tensors_of(const Layout& layout);
// Bytes of a block in one layer and one tensor.
[[nodiscard]] std::uint64_t block_bytes(const Layout& layout);

}  // namespace baton::layout
