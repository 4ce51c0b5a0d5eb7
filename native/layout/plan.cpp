#include "layout/plan.h"

#include <algorithm>

namespace baton::layout {
namespace {

[[noreturn]] void refuse(const Layout& source, const Layout& sink, const char* why) {
  throw Mismatch("the KV layouts differ in " + std::string(why) + ": the source has '" + to_string(source) +
                 "', the sink '" + to_string(sink) + "'");
}

// Walks a table token by token, as far at once as its blocks allow.
class Cursor {
 public:
  Cursor(const Table& table, std::uint32_t block_tokens, std::uint32_t position)
      : table_(table), block_tokens_(block_tokens), offset_(position - table.origin) {}

  [[nodiscard]] std::uint32_t block() const { return table_.blocks[offset_ / block_tokens_]; }
  [[nodiscard]] std::uint32_t token() const { return offset_ % block_tokens_; }
  [[nodiscard]] std::uint32_t left() const { return block_tokens_ - token(); }
  void advance(std::uint32_t tokens) { offset_ += tokens; }
  // Whether the present place is the one that follows the `tokens` after (block, token).
  [[nodiscard]] bool follows(std::uint32_t block, std::uint32_t token, std::uint32_t tokens) const {
    const std::uint64_t from = std::uint64_t{block} * block_tokens_ + token;
    return from + tokens == std::uint64_t{this->block()} * block_tokens_ + this->token();
  }

 private:
  const Table& table_;
  std::uint32_t block_tokens_;
  std::uint32_t offset_;
};

}  // namespace

void check_convertible(const Layout& source, const Layout& sink) {
  check(source);
  check(sink);
  if (source.layers != sink.layers) refuse(source, sink, "layers");
  if ((source.form == Form::latent) != (sink.form == Form::latent)) refuse(source, sink, "form");
  if (source.kv_heads != sink.kv_heads) refuse(source, sink, "kv_heads");
  if (source.dim != sink.dim) refuse(source, sink, "dim");
  if (source.dtype != sink.dtype) refuse(source, sink, "dtype");
}

bool identical(const Layout& source, const Layout& sink) {
  check_convertible(source, sink);
  return block_of(source) == block_of(sink);
}

std::vector<Share> shares(const Layout& source, const Layout& sink) {
  check_convertible(source, sink);
  Layout rank = source;
  const std::uint32_t held = heads_of(source).count;
  // Ranks that hold the same heads are neighbours; sinks are spread over them.
  const std::uint32_t copies =
      source.form == Form::latent ? source.tp_size : std::max(source.tp_size / source.kv_heads, 1u);
  const Heads wanted = heads_of(sink);
  std::vector<Share> out;
  for (std::uint32_t head = wanted.first; head < wanted.first + wanted.count;) {
    rank.tp_rank = head / held * copies + sink.tp_rank % copies;
    const Heads common = common_heads(rank, sink);
    out.push_back({rank.tp_rank, common});
    head = common.first + common.count;
  }
  return out;
}

Heads common_heads(const Layout& source, const Layout& sink) {
  check_convertible(source, sink);
  const Heads theirs = heads_of(source), ours = heads_of(sink);
  const std::uint32_t first = std::max(theirs.first, ours.first);
  const std::uint32_t end = std::min(theirs.first + theirs.count, ours.first + ours.count);
  if (first >= end) refuse(source, sink, "the heads that their ranks hold");
  return {first, end - first};
}

void check_range(Tokens range, const Table& table, std::uint32_t block_tokens) {
  const std::uint64_t end = std::uint64_t{range.first} + range.count;
  if (range.count == 0 || end > kTokensMax) {
    throw Invalid("a range has from 1 token to 2**24, and ends by then");
  }
  if (range.first < table.origin || end > table.origin + std::uint64_t{table.blocks.size()} * block_tokens) {
    throw Invalid("tokens " + std::to_string(range.first) + " to " + std::to_string(end) + " are not within " +
                  std::to_string(table.blocks.size()) + " blocks of " + std::to_string(block_tokens) +
                  " tokens from token " + std::to_string(table.origin) + " on");
  }
}

std::vector<Move> plan(const Block& source, const Table& source_table, const Block& sink, const Table& sink_table,
                       Tokens range) {
  check_range(range, source_table, source.tokens);
  check_range(range, sink_table, sink.tokens);
  const bool equal = source == sink;
  std::vector<Move> moves;
  Cursor from(source_table, source.tokens, range.first), to(sink_table, sink.tokens, range.first);
  for (std::uint32_t left = range.count; left > 0;) {
    const std::uint32_t tokens = std::min({left, from.left(), to.left()});
    const bool whole = equal && tokens == source.tokens;
    if (!moves.empty() && moves.back().whole == whole &&
        from.follows(moves.back().source_block, moves.back().source_token, moves.back().tokens) &&
        to.follows(moves.back().sink_block, moves.back().sink_token, moves.back().tokens)) {
      moves.back().tokens += tokens;
    } else {
      moves.push_back({from.block(), from.token(), to.block(), to.token(), tokens, whole});
    }
    from.advance(tokens);
    to.advance(tokens);
    left -= tokens;
  }
  return moves;
}

std::vector<Chunk> chunks(const Layout& sink, std::uint32_t layer, Heads heads, Tokens range, std::uint64_t bytes_max) {
  const Block block = block_of(sink);
  std::vector<Plane> planes = {Plane::k, Plane::v};
  if (block.planes == 1) planes = {Plane::latent};
  (void)chunk_bytes(sink, {layer, planes[0], range, heads});
  const std::uint64_t rows = bytes_max / block.row_bytes();
  if (rows == 0) throw Invalid("a chunk of " + std::to_string(bytes_max) + " bytes holds not one token and head");
  const auto heads_step = static_cast<std::uint32_t>(std::min<std::uint64_t>(heads.count, rows));
  auto tokens_step = static_cast<std::uint32_t>(std::min<std::uint64_t>(range.count, rows / heads_step));
  if (tokens_step >= block.tokens) tokens_step -= tokens_step % block.tokens;
  std::vector<Chunk> out;
  const std::uint32_t end = range.first + range.count;
  for (std::uint32_t first = range.first; first < end;) {
    // The first piece ends where a block of the sink's does, if its blocks begin at multiples of their size.
    const std::uint32_t ahead = tokens_step >= block.tokens ? first % block.tokens : 0;
    const std::uint32_t count = std::min(end - first, tokens_step - ahead);
    for (std::uint32_t head = heads.first; head < heads.first + heads.count; head += heads_step) {
      const std::uint32_t held = std::min(heads_step, heads.first + heads.count - head);
      for (const Plane plane : planes) out.push_back({layer, plane, {first, count}, {head, held}});
    }
    first += count;
  }
  return out;
}

std::uint64_t chunk_bytes(const Layout& layout, const Chunk& chunk) {
  const Block block = block_of(layout);
  (void)index_of(block, chunk.plane);
  if (chunk.layer >= layout.layers) throw Invalid("there is no layer " + std::to_string(chunk.layer));
  if (chunk.tokens.count == 0 || std::uint64_t{chunk.tokens.first} + chunk.tokens.count > kTokensMax) {
    throw Invalid("a chunk has from 1 token to 2**24, and ends by then");
  }
  const std::uint64_t end = std::uint64_t{chunk.heads.first} + chunk.heads.count;
  if (chunk.heads.count == 0 || chunk.heads.first < block.heads.first || end > block.heads.first + block.heads.count) {
    throw Invalid("heads " + std::to_string(chunk.heads.first) + " to " + std::to_string(end) +
                  " are not held by the rank of '" + to_string(layout) + "'");
  }
  return std::uint64_t{chunk.tokens.count} * chunk.heads.count * block.row_bytes();
}

}  // namespace baton::layout
