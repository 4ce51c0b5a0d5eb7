#include "layout/convert.h"

#include <algorithm>
#include <cstring>

#include "layout/cells.h"

namespace baton::layout {
namespace {

constexpr std::uint32_t kGroupTokens = 64;  // One line of one-byte words.

constexpr std::size_t kLineBytes = 64;
constexpr std::size_t kTokensAhead = 2;

// Place of a token: the offset of its block, and its place within.
struct Spot {
  std::uint64_t block_at;
  std::uint32_t token;
};

// Some tokens, in order, on one side.
struct Spots {
  Spot at[kGroupTokens];
  std::uint32_t count = 0;

  void add(const Side& side, std::uint32_t block, std::uint32_t token, std::uint32_t tokens) {
    // A move runs on into the blocks that follow by number.
    std::uint64_t block_at = (block + token / side.block.tokens) * side.stride;
    token %= side.block.tokens;
    for (; tokens > 0; --tokens) {
      at[count++] = {block_at, token};
      if (++token == side.block.tokens) {
        token = 0;
        block_at += side.stride;
      }
    }
  }

  // The tokens from `i` on that are neighbours within one block.
  [[nodiscard]] std::size_t run(std::size_t i) const {
    std::size_t end = i + 1;
    while (end < count && at[end].block_at == at[i].block_at && at[end].token == at[i].token + (end - i)) ++end;
    return end - i;
  }
};

// One plane of one head on one side.
struct Lane {
  const Block& block;
  const Grid& grid;
  std::uint8_t* cells;  // Start of the head's part in block 0.
  std::uint64_t row_bytes;

  [[nodiscard]] bool is_rows() const { return grid.cells == Cells::rows; }
  [[nodiscard]] std::uint8_t* row(const Spot& spot) const {
    return cells + spot.block_at + spot.token * grid.token.inner;
  }
};

using RowPointers = std::uint8_t* [kGroupTokens];

void copy_rows(const Lane& source, const Spots& from, const Lane& sink, const Spots& to) {
  for (std::size_t i = 0; i < from.count;) {
    const std::uint8_t* const read = source.row(from.at[i]);
    std::uint8_t* const write = sink.row(to.at[i]);
    std::size_t bytes = 0;
    do {
      bytes += source.row_bytes;
      ++i;
    } while (i < from.count && source.row(from.at[i]) == read + bytes && sink.row(to.at[i]) == write + bytes);
    std::memcpy(write, read, bytes);
  }
}

// The same for several heads, from the first one's lanes.
void copy_heads(const Lane& source, const Spots& from, const Lane& sink, const Spots& to, std::uint32_t heads) {
  for (std::size_t i = 0; i < from.count; ++i) {
    const std::uint8_t* read = source.row(from.at[i]);
    std::uint8_t* write = sink.row(to.at[i]);
    // The processor does not look ahead across so many places: a quarter faster where pages are large.
    const std::size_t next = std::min<std::size_t>(i + kTokensAhead, from.count - 1);
    const std::uint8_t* read_ahead = source.row(from.at[next]);
    const std::uint8_t* write_ahead = sink.row(to.at[next]);
    for (std::uint32_t head = 0; head < heads; ++head) {
      for (std::size_t line = 0; line < source.row_bytes; line += kLineBytes) {
        __builtin_prefetch(read_ahead + line);
        __builtin_prefetch(write_ahead + line, 1);
      }
      read_ahead += source.grid.head_stride;
      write_ahead += sink.grid.head_stride;
      std::memcpy(write, read, source.row_bytes);
      read += source.grid.head_stride;
      write += sink.grid.head_stride;
    }
  }
}

// Moves a group of tokens of one plane and head. `scratch` holds a group's rows, between two packed sides.
void move_group(const Lane& source, const Spots& from, const Lane& sink, const Spots& to,
                std::span<std::uint8_t> scratch) {
  if (source.is_rows() && sink.is_rows()) return copy_rows(source, from, sink, to);
  RowPointers rows;
  for (std::size_t i = 0; i < from.count; ++i) {
    rows[i] = source.is_rows() ? source.row(from.at[i])
              : sink.is_rows() ? sink.row(to.at[i])
                               : scratch.data() + i * source.row_bytes;
  }
  if (!source.is_rows()) {
    for (std::size_t i = 0; i < from.count; i += from.run(i)) {
      unpack(source.block, source.grid, source.cells + from.at[i].block_at, from.at[i].token, {rows + i, from.run(i)});
    }
  }
  if (!sink.is_rows()) {
    for (std::size_t i = 0; i < to.count; i += to.run(i)) {
      pack(sink.block, sink.grid, sink.cells + to.at[i].block_at, to.at[i].token, {rows + i, to.run(i)});
    }
  }
}

// One plane of one layer.
class PlaneMover {
 public:
  PlaneMover(const Side& source, std::uint32_t source_plane, const Side& sink, std::uint32_t sink_plane, Heads heads)
      : source_(source),
        sink_(sink),
        source_grid_(source.block.grids[source_plane]),
        sink_grid_(sink.block.grids[sink_plane]),
        heads_(heads),
        row_bytes_(source.block.row_bytes()) {
    // Where a token's heads are side by side on both sides, they are one wide row.
    if (source_grid_.cells == Cells::rows && sink_grid_.cells == Cells::rows &&
        source_grid_.head_stride == row_bytes_ && sink_grid_.head_stride == row_bytes_) {
      row_bytes_ *= heads_.count;
      heads_.count = 1;
    }
    // Where they are side by side on one side, memory is read or written in order if a token's heads go together.
    by_token_ =
        heads_.count > 1 && source_grid_.cells == Cells::rows && sink_grid_.cells == Cells::rows &&
        (source_grid_.head_stride < source_grid_.token.inner || sink_grid_.head_stride < sink_grid_.token.inner);
    if (source_grid_.cells != Cells::rows && sink_grid_.cells != Cells::rows) {
      scratch_.resize(kGroupTokens * row_bytes_);
    }
  }

  void move(std::span<const Move> moves) {
    for (const Move& move : moves) {
      for (std::uint32_t done = 0; done < move.tokens;) {
        // Groups end at multiples of their size within a packed block, so that later ones begin there.
        const std::uint32_t phase = packed_token(move, done) % std::min(packed_tokens(), kGroupTokens);
        if (from_.count == 0) limit_ = kGroupTokens - phase;
        const auto tokens = std::min(move.tokens - done, limit_ - from_.count);
        from_.add(source_, move.source_block, move.source_token + done, tokens);
        to_.add(sink_, move.sink_block, move.sink_token + done, tokens);
        done += tokens;
        if (from_.count == limit_) flush();
      }
    }
    flush();
  }

 private:
  [[nodiscard]] std::uint32_t packed_tokens() const {
    return sink_grid_.cells != Cells::rows ? sink_.block.tokens : source_.block.tokens;
  }
  [[nodiscard]] std::uint32_t packed_token(const Move& move, std::uint32_t done) const {
    return ((sink_grid_.cells != Cells::rows ? move.sink_token : move.source_token) + done) % packed_tokens();
  }

  [[nodiscard]] Lane lane(const Side& side, const Grid& grid, std::uint32_t head) const {
    return {side.block, grid,
            side.tensors[grid.tensor] + grid.origin + (head - side.block.heads.first) * grid.head_stride, row_bytes_};
  }

  void flush() {
    if (from_.count == 0) return;
    if (by_token_) {
      copy_heads(lane(source_, source_grid_, heads_.first), from_, lane(sink_, sink_grid_, heads_.first), to_,
                 heads_.count);
    } else {
      for (std::uint32_t head = heads_.first; head < heads_.first + heads_.count; ++head) {
        move_group(lane(source_, source_grid_, head), from_, lane(sink_, sink_grid_, head), to_, scratch_);
      }
    }
    from_.count = to_.count = 0;
  }

  const Side& source_;
  const Side& sink_;
  const Grid& source_grid_;
  const Grid& sink_grid_;
  Heads heads_;
  std::uint64_t row_bytes_;
  bool by_token_ = false;
  std::vector<std::uint8_t> scratch_;
  Spots from_, to_;
  std::uint32_t limit_ = kGroupTokens;
};

void copy_blocks(const Side& source, const Side& sink, const Move& move) {
  const std::uint64_t bytes = source.block.bytes;
  const std::uint32_t blocks = move.tokens / source.block.tokens;
  const bool dense = source.stride == bytes && sink.stride == bytes;
  for (std::uint32_t tensor = 0; tensor < source.block.tensors; ++tensor) {
    const std::uint8_t* read = source.tensors[tensor] + move.source_block * source.stride;
    std::uint8_t* write = sink.tensors[tensor] + move.sink_block * sink.stride;
    if (dense) {
      std::memcpy(write, read, blocks * bytes);
      continue;
    }
    for (std::uint32_t i = 0; i < blocks; ++i) std::memcpy(write + i * sink.stride, read + i * source.stride, bytes);
  }
}

void check_blocks(const Pool& pool, const Table& table) {
  for (const std::uint32_t block : table.blocks) {
    if (block >= pool.blocks()) {
      throw Invalid("the pool has " + std::to_string(pool.blocks()) + " blocks and none with the number " +
                    std::to_string(block));
    }
  }
}

// The common part of `gather` and `scatter`: a piece in wire form is one block of its own.
struct Wire {
  Block block;
  std::uint32_t number = 0;
  Table table;
  std::array<std::uint8_t*, 1> tensor;

  Wire(const Pool& pool, const Table& pool_table, const Chunk& chunk, std::uint8_t* data, std::size_t bytes)
      : block(wire_block(pool.block(), chunk.heads, chunk.tokens.count)),
        table{.blocks = {&number, 1}, .origin = chunk.tokens.first},
        tensor{data} {
    const std::uint64_t expected = chunk_bytes(pool.layout(), chunk);
    if (bytes != expected) {
      throw Invalid("the chunk has " + std::to_string(expected) + " bytes in wire form, not " + std::to_string(bytes));
    }
    check_blocks(pool, pool_table);
  }
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  [[nodiscard]] Side side() const { return {block, tensor, block.bytes}; }
};

Side side_of(const Pool& pool, std::uint32_t layer) {
  return {pool.block(), pool.layer(layer), pool.stride_bytes()};
}

constexpr std::pair<std::uint32_t, std::uint32_t> kPlanes[] = {{0, 0}, {1, 1}};

}  // namespace

void carry_on_host(const Side& source, const Side& sink, std::span<const Move> moves, Heads heads, Planes planes) {
  std::vector<Move> parts;
  for (const Move& move : moves) {
    if (move.whole) {
      copy_blocks(source, sink, move);
    } else {
      parts.push_back(move);
    }
  }
  for (const auto& [source_plane, sink_plane] : planes) {
    PlaneMover(source, source_plane, sink, sink_plane, heads).move(parts);
  }
}

Pool::Pool(const Layout& layout, std::vector<std::uint8_t*> tensors, std::uint32_t blocks, std::uint64_t stride_bytes)
    : layout_(layout),
      block_(block_of(layout)),
      tensors_(std::move(tensors)),
      blocks_(blocks),
      stride_bytes_(stride_bytes) {
  if (tensors_.size() != std::size_t{layout.layers} * block_.tensors) {
    throw Invalid("a pool of '" + to_string(layout) + "' has " +
                  std::to_string(std::size_t{layout.layers} * block_.tensors) + " tensors, not " +
                  std::to_string(tensors_.size()));
  }
  if (std::find(tensors_.begin(), tensors_.end(), nullptr) != tensors_.end()) throw Invalid("an address is null");
  if (blocks == 0) throw Invalid("a pool has at least one block");
  std::uint64_t end = 0;
  if (stride_bytes < block_.bytes || __builtin_mul_overflow(stride_bytes, std::uint64_t{blocks}, &end) ||
      end > std::uint64_t{1} << 47) {
    throw Invalid(std::to_string(blocks) + " blocks of " + std::to_string(block_.bytes) + " bytes cannot lie " +
                  std::to_string(stride_bytes) + " bytes apart");
  }
}

std::uint64_t convert(const Pool& source, const Table& source_table, const Pool& sink, const Table& sink_table,
                      Tokens range, std::uint32_t first_layer, std::uint32_t layers, const Carry& carry) {
  const Heads heads = common_heads(source.layout(), sink.layout());
  if (layers == 0 || std::uint64_t{first_layer} + layers > source.layout().layers) {
    throw Invalid("layers " + std::to_string(first_layer) + " to " +
                  std::to_string(std::uint64_t{first_layer} + layers) + " are not among the model's " +
                  std::to_string(source.layout().layers));
  }
  check_blocks(source, source_table);
  check_blocks(sink, sink_table);
  const std::vector<Move> moves = plan(source.block(), source_table, sink.block(), sink_table, range);
  for (std::uint32_t layer = first_layer; layer < first_layer + layers; ++layer) {
    carry(side_of(source, layer), side_of(sink, layer), moves, heads, {kPlanes, source.block().planes});
  }
  return std::uint64_t{range.count} * heads.count * source.block().row_bytes() * source.block().planes * layers;
}

std::uint64_t convert_tensor(const Pool& source, const Table& source_table, const Pool& sink, const Table& sink_table,
                             Tokens range, std::uint32_t tensor) {
  const Block& block = source.block();
  if (block.tensors == 1) return convert(source, source_table, sink, sink_table, range, tensor, 1);
  const Heads heads = common_heads(source.layout(), sink.layout());
  const std::uint32_t layer = tensor / block.tensors;
  if (layer >= source.layout().layers) throw Invalid("there is no tensor " + std::to_string(tensor));
  check_blocks(source, source_table);
  check_blocks(sink, sink_table);
  std::vector<Move> moves = plan(block, source_table, sink.block(), sink_table, range);
  for (Move& move : moves) move.whole = false;  // Whole blocks are of both tensors.
  carry_on_host(side_of(source, layer), side_of(sink, layer), moves, heads, {&kPlanes[tensor % block.tensors], 1});
  return std::uint64_t{range.count} * heads.count * block.row_bytes();
}

void gather(const Pool& pool, const Table& table, const Chunk& chunk, std::span<std::uint8_t> out, const Carry& carry) {
  const Wire wire(pool, table, chunk, out.data(), out.size());
  const std::pair<std::uint32_t, std::uint32_t> plane(index_of(pool.block(), chunk.plane), 0);
  carry(side_of(pool, chunk.layer), wire.side(), plan(pool.block(), table, wire.block, wire.table, chunk.tokens),
        chunk.heads, {&plane, 1});
}

void scatter(const Pool& pool, const Table& table, const Chunk& chunk, std::span<const std::uint8_t> in,
             const Carry& carry) {
  // The wire is the source here and is only read; one type of side serves both directions.
  const Wire wire(pool, table, chunk, const_cast<std::uint8_t*>(in.data()), in.size());
  const std::pair<std::uint32_t, std::uint32_t> plane(0, index_of(pool.block(), chunk.plane));
  carry(wire.side(), side_of(pool, chunk.layer), plan(wire.block, wire.table, pool.block(), table, chunk.tokens),
        chunk.heads, {&plane, 1});
}

}  // namespace baton::layout
