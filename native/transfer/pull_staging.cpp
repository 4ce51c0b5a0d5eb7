// Chunks of a source whose blocks are not this side's: each is verified where it is staged, then converted.
#include <algorithm>
#include <numeric>

#include "transfer/pull.h"

namespace baton::transfer {

std::vector<std::uint32_t> Sink::staged_blocks(const Pull& pull, const Chunk& chunk) const {
  std::vector<std::uint32_t> blocks(chunk.run.blocks);
  std::iota(blocks.begin(), blocks.end(), chunk.staged * chunk_blocks(pull.pool, options_.limits));
  return blocks;
}

// The source's first and last block may hold more than the pull wants, and go on where this side's blocks end.
void Sink::convert(Pull& pull, std::uint32_t sequence, const Chunk& chunk) {
  const std::uint32_t staged_origin = (pull.first_block + chunk.run.first) * pull.pool.block_tokens;
  const std::uint32_t first = std::max(staged_origin, pull.first_token);
  const std::uint32_t end = std::min(staged_origin + chunk.run.blocks * pull.pool.block_tokens, pull.tokens);
  const std::uint32_t block_tokens = geometry_.block_tokens;
  const std::uint32_t from = (first - pull.first_token) / block_tokens;
  const std::uint32_t to = (end - pull.first_token + block_tokens - 1) / block_tokens;
  pull.converting[sequence] = chunk;
  out_.put(Convert{.connection = chunk.connection,
                   .pull = pull.id,
                   .sequence = sequence,
                   .layer = chunk.run.layer,
                   .staged = staged_blocks(pull, chunk),
                   .staged_origin = staged_origin,
                   .blocks = {pull.blocks.begin() + from, pull.blocks.begin() + to},
                   .origin = pull.first_token + from * block_tokens,
                   .first_token = first,
                   .tokens = end - first});
}

void Sink::on_converted(double now_s, const Converted& converted) {
  const auto found = pulls_.find(converted.pull);
  if (found == pulls_.end()) return;
  Pull& pull = found->second;
  const auto at = pull.converting.find(converted.sequence);
  if (at == pull.converting.end()) return;  // It belongs to a generation that was given up.
  account(now_s, pull);
  pull.progress_s = now_s;
  const Chunk chunk = at->second;
  pull.converting.erase(at);
  const std::string endpoint = pull.endpoint;
  peers_.at(endpoint).lanes.at(chunk.connection).staging->release(chunk.staged);
  count(now_s, pull, chunk);
  request_more(now_s, endpoint);
}

}  // namespace baton::transfer
