// The conversions under the sanitizers: every pair of layouts, exact-size memory, odd ranges; and descriptors that lie.
#include <cstring>
#include <random>

#include "layout/pieces.h"
#include "tests/check.h"

using namespace baton::layout;

namespace {

constexpr std::uint32_t kLayers = 2, kTokens = 77, kFirst = 11;

Layout layout_of(Order order, Form form, Packing packing, std::uint32_t block_tokens, Dtype dtype) {
  return {.layers = kLayers,
          .kv_heads = form == Form::latent ? 1u : 4u,
          .dim = 48,
          .dtype = dtype,
          .order = order,
          .form = form,
          .packing = packing,
          .block_tokens = block_tokens};
}

// All layouts of one model that can hold it.
std::vector<Layout> layouts_of(Dtype dtype, bool latent) {
  std::vector<Layout> out;
  for (const std::uint32_t tokens : {1u, 16u, 32u, 128u}) {
    if (latent) {
      out.push_back(layout_of(Order::nhd, Form::latent, Packing::plain, tokens, dtype));
      continue;
    }
    for (const Order order : {Order::nhd, Order::hnd}) {
      out.push_back(layout_of(order, Form::split, Packing::plain, tokens, dtype));
      out.push_back(layout_of(order, Form::fused, Packing::plain, tokens, dtype));
    }
    out.push_back(layout_of(Order::hnd, Form::fused, Packing::vec, tokens, dtype));
    if (tokens % 16 == 0 && element_bytes(dtype) <= 2) {
      out.push_back(layout_of(Order::hnd, Form::fused, Packing::amx, tokens, dtype));
    }
  }
  return out;
}

// A cache in memory of exactly its size, so that a byte beyond is seen; the blocks' table runs backwards.
struct Cache {
  Layout layout;
  std::vector<std::vector<std::uint8_t>> memory;
  std::vector<std::uint32_t> blocks;
  std::uint32_t origin = kFirst / 2;

  Cache(const Layout& of, std::uint32_t seed) : layout(of) {
    const std::uint32_t count = (kFirst + kTokens - origin + of.block_tokens - 1) / of.block_tokens;
    for (std::uint32_t i = count; i > 0; --i) blocks.push_back(i - 1);
    std::mt19937 random(seed);
    memory.resize(std::size_t{of.layers} * tensors_of(of), std::vector<std::uint8_t>(count * block_bytes(of)));
    for (auto& tensor : memory) {
      for (auto& byte : tensor) byte = static_cast<std::uint8_t>(random());
    }
  }

  Pool pool() {
    std::vector<std::uint8_t*> tensors;
    for (auto& tensor : memory) tensors.push_back(tensor.data());
    return {layout, tensors, static_cast<std::uint32_t>(blocks.size()), block_bytes(layout)};
  }
  [[nodiscard]] Table table() const { return {blocks, origin}; }

  std::vector<std::uint8_t> wire(const Chunk& chunk) {
    std::vector<std::uint8_t> out(chunk_bytes(layout, chunk));
    gather(pool(), table(), chunk, out);
    return out;
  }
};

template <typename Error, typename Call>
bool throws(Call call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  }
  return false;
}

// Moves pieces as a GPU's kernel does.
void carry_out(const std::vector<BatonGpuPiece>& pieces) {
  for (const BatonGpuPiece& piece : pieces) {
    for (std::uint64_t group = 0; group < piece.groups; ++group) {
      for (std::uint64_t row = 0; row < piece.rows; ++row) {
        std::memcpy(reinterpret_cast<void*>(piece.to + group * piece.to_group + row * piece.to_row),
                    reinterpret_cast<void*>(piece.from + group * piece.from_group + row * piece.from_row),
                    piece.row_bytes);
      }
    }
  }
}

void every_pair(Dtype dtype, bool latent) {
  const std::vector<Layout> layouts = layouts_of(dtype, latent);
  std::vector<Plane> planes = {Plane::k, Plane::v};
  if (latent) planes = {Plane::latent};
  for (const Layout& from : layouts) {
    for (const Layout& to : layouts) {
      Cache source(from, 1), sink(to, 2), other(to, 2);
      convert(source.pool(), source.table(), sink.pool(), sink.table(), {kFirst, kTokens}, 0, kLayers);
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        for (const Plane plane : planes) {
          const Chunk chunk{layer, plane, {kFirst, kTokens}, heads_of(from)};
          const std::vector<std::uint8_t> wire = source.wire(chunk);
          CHECK(sink.wire(chunk) == wire);
          scatter(other.pool(), other.table(), chunk, wire);
        }
      }
      // Directly and over the wire is the same, also in what is left alone.
      CHECK(sink.memory == other.memory);
      // The pieces that a GPU gets have the same result.
      if (from.packing != Packing::plain || to.packing != Packing::plain) continue;
      Cache by_pieces(to, 2);
      PieceList list;
      convert(source.pool(), source.table(), by_pieces.pool(), by_pieces.table(), {kFirst, kTokens}, 0, kLayers,
              std::ref(list));
      carry_out(list.pieces());
      CHECK(by_pieces.memory == sink.memory);
    }
  }
}

}  // namespace

TEST(layouts_convert_in_every_pair) {
  every_pair(Dtype::float32, false);
  every_pair(Dtype::bfloat16, false);
  every_pair(Dtype::float8_e4m3, false);
  every_pair(Dtype::bfloat16, true);
}

// The formulas of the packed forms once more, element by element.
TEST(packed_elements_lie_where_the_engine_puts_them) {
  for (const Packing packing : {Packing::vec, Packing::amx}) {
    const Layout layout = layout_of(Order::hnd, Form::fused, packing, 32, Dtype::bfloat16);
    Cache cache(layout, 3);
    for (const Plane plane : {Plane::k, Plane::v}) {
      const std::vector<std::uint8_t> wire = cache.wire({1, plane, {kFirst, kTokens}, {2, 1}});
      for (std::uint32_t i = 0; i < kTokens; ++i) {
        const std::uint32_t at = kFirst + i - cache.origin, t = at % 32, dim = layout.dim;
        for (std::uint32_t d = 0; d < dim; ++d) {
          std::size_t element = packing == Packing::vec ? (plane == Plane::k ? d * 32 + t : t * dim + d)
                                : plane == Plane::k     ? t / 16 * (16 * dim) + d / 2 * 32 + t % 16 * 2 + d % 2
                                                        : d / 16 * (16 * 32) + t / 2 * 32 + d % 16 * 2 + t % 2;
          element += (2 * 2 + (plane == Plane::v ? 1 : 0)) * 32 * dim;
          const std::uint8_t* bytes = cache.memory[1].data() + cache.blocks[at / 32] * block_bytes(layout);
          CHECK(bytes[2 * element] == wire[2 * (i * dim + d)] && bytes[2 * element + 1] == wire[2 * (i * dim + d) + 1]);
        }
      }
    }
  }
}

TEST(equal_layouts_move_whole_blocks_in_runs) {
  const Layout layout = layout_of(Order::hnd, Form::fused, Packing::vec, 32, Dtype::bfloat16);
  const std::vector<std::uint32_t> from = {4, 5, 6, 9}, to = {0, 1, 2, 3};
  const Block block = block_of(layout);
  const std::vector<Move> moves = plan(block, {from, 64}, block, {to, 64}, {64, 4 * 32 - 5});
  const std::vector<Move> expected = {{4, 0, 0, 0, 96, true}, {9, 0, 3, 0, 27, false}};
  CHECK(moves == expected);
}

TEST(pieces_are_as_few_and_long_as_the_layouts_allow) {
  const auto count = [](const Layout& from, const Layout& to) {
    Cache source(from, 1), sink(to, 2);
    PieceList list;
    convert(source.pool(), source.table(), sink.pool(), sink.table(), {kFirst, 32}, 0, 1, std::ref(list));
    return list.pieces();
  };
  const auto fused = [](Order order, std::uint32_t tokens) {
    return layout_of(order, Form::fused, Packing::plain, tokens, Dtype::bfloat16);
  };
  // 32 tokens from the seventh of a block on, tables that run backwards: three runs within blocks of both sides.
  const auto other_size = count(fused(Order::nhd, 16), fused(Order::nhd, 32));
  CHECK(other_size.size() == 3 && other_size[0].rows * other_size[0].groups == 1);
  CHECK(other_size[0].row_bytes == 10 * 4 * 2 * 48 * 2);
  const auto other_order = count(fused(Order::hnd, 32), fused(Order::nhd, 32));
  CHECK(other_order[0].row_bytes == 2 * 48 * 2 && other_order[0].groups == 4);
  const Layout packed = layout_of(Order::hnd, Form::fused, Packing::vec, 32, Dtype::bfloat16);
  CHECK(throws<Invalid>([&] { (void)count(packed, fused(Order::hnd, 32)); }));
}

TEST(layouts_that_differ_are_refused_with_both_named) {
  const Layout base = layout_of(Order::hnd, Form::fused, Packing::plain, 16, Dtype::bfloat16);
  for (const auto change :
       {+[](Layout& l) { l.layers = 3; }, +[](Layout& l) { l.kv_heads = 8; }, +[](Layout& l) { l.dim = 64; },
        +[](Layout& l) { l.dtype = Dtype::float16; }, +[](Layout& l) { l.form = Form::latent, l.kv_heads = 1; }}) {
    Layout other = base;
    change(other);
    try {
      check_convertible(base, other);
      CHECK(false);
    } catch (const Mismatch& error) {
      const std::string text = error.what();
      CHECK(text.find(to_string(base)) != std::string::npos && text.find(to_string(other)) != std::string::npos);
    }
  }
}

TEST(descriptors_that_lie_are_invalid_and_never_crash) {
  const std::string good = to_string(layout_of(Order::hnd, Form::fused, Packing::amx, 32, Dtype::bfloat16));
  CHECK(to_string(parse(good)) == good);
  std::mt19937 random(7);
  for (int i = 0; i < 20000; ++i) {
    std::string text = good;
    for (std::uint32_t edits = 1 + random() % 3; edits > 0; --edits) {
      const std::size_t at = random() % text.size();
      switch (random() % 4) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text.erase(at, 1 + random() % 9);
          break;
        case 2:
          text.insert(at, 1 + random() % 12, static_cast<char>('0' + random() % 10));
          break;
        default:
          text.insert(at, good.substr(random() % good.size(), 9));
      }
      if (text.empty()) text = "=";
    }
    try {
      const Layout layout = parse(text);
      CHECK(to_string(layout) == text);
      CHECK(block_of(layout).bytes > 0 && block_of(layout).bytes <= std::uint64_t{1} << 51);
    } catch (const Invalid&) {
    }
  }
}

TEST(ranges_blocks_and_buffers_are_checked_before_anything_moves) {
  Cache source(layout_of(Order::nhd, Form::split, Packing::plain, 16, Dtype::bfloat16), 1);
  const std::vector<std::uint8_t> before = source.memory[0];
  const Chunk good{0, Plane::k, {kFirst, kTokens}, {0, 4}};
  std::vector<std::uint8_t> wire(chunk_bytes(source.layout, good));
  const auto refuses = [&](const Chunk& chunk, const Table& table, std::span<std::uint8_t> data) {
    return throws<Invalid>([&] { gather(source.pool(), table, chunk, data); }) &&
           throws<Invalid>([&] { scatter(source.pool(), table, chunk, data); });
  };
  constexpr std::uint32_t kHuge = 0xFFFFFFFF;
  CHECK(refuses({kLayers, Plane::k, {kFirst, kTokens}, {0, 4}}, source.table(), wire));
  CHECK(refuses({0, Plane::latent, {kFirst, kTokens}, {0, 4}}, source.table(), wire));
  CHECK(refuses({0, Plane::k, {kFirst, 0}, {0, 4}}, source.table(), wire));
  CHECK(refuses({0, Plane::k, {kHuge, kHuge}, {0, 4}}, source.table(), wire));
  CHECK(refuses({0, Plane::k, {0, kTokens}, {0, 4}}, source.table(), wire));
  CHECK(refuses({0, Plane::k, {kFirst + 20, kTokens}, {0, 4}}, source.table(), wire));
  CHECK(refuses({0, Plane::k, {kFirst, kTokens}, {0, 5}}, source.table(), wire));
  CHECK(refuses({0, Plane::k, {kFirst, kTokens}, {kHuge, kHuge}}, source.table(), wire));
  CHECK(refuses({0, Plane::k, {kFirst, kTokens}, {0, 0}}, source.table(), wire));
  CHECK(refuses(good, source.table(), std::span(wire).first(wire.size() - 1)));
  const std::vector<std::uint32_t> blocks = {0, 1, 2, 3, 4, kHuge};
  CHECK(refuses(good, {blocks, source.origin}, wire));
  CHECK(source.memory[0] == before);
  CHECK(throws<Invalid>([&] { (void)chunks(source.layout, 0, {0, 4}, {0, 10}, 95); }));
  CHECK(throws<Invalid>([&] { Pool(source.layout, {}, 1, 1 << 20); }));
  CHECK(throws<Invalid>([&] { Pool(source.layout, std::vector<std::uint8_t*>(4), 1, 1 << 20); }));
  std::uint8_t byte = 0;
  CHECK(throws<Invalid>([&] { Pool(source.layout, std::vector<std::uint8_t*>(4, &byte), 0, 1 << 20); }));
  CHECK(throws<Invalid>([&] { Pool(source.layout, std::vector<std::uint8_t*>(4, &byte), 2, 100); }));
  CHECK(throws<Invalid>([&] { Pool(source.layout, std::vector<std::uint8_t*>(4, &byte), kHuge, ~std::uint64_t{0}); }));
}
