#include "transfer/converter.h"

#include "transfer/staging.h"

namespace baton::transfer {
namespace {

Pool pool_in(std::uint8_t* memory, const Geometry& source, const Limits& limits) {
  return {.layers = std::vector(source.tensors(), memory),
          .block_bytes = source.block_bytes,
          .stride_bytes = source.block_bytes,
          .blocks = Staging::slots(source, limits) * chunk_blocks(source, limits)};
}

}  // namespace

Converter::Converter(const Geometry& source, const Limits& limits, const layout::Pool& own)
    : chunk_bytes_max_(chunk_blocks(source, limits) * source.block_bytes),
      // Pages come from the system when they are first written: most pulls need few.
      memory_(std::make_unique_for_overwrite<std::uint8_t[]>(Staging::slots(source, limits) * chunk_bytes_max_)),
      pool_(pool_in(memory_.get(), source, limits)),
      staged_(source.layout.value(), pool_.layers, pool_.blocks, pool_.stride_bytes),
      own_(own) {}

void Converter::stop(PullId pull) {
  std::erase_if(waiting_, [&](const Convert& chunk) { return chunk.pull == pull; });
}

bool Converter::advance(std::vector<Event>& happened) {
  if (waiting_.empty()) return false;
  const Convert chunk = std::move(waiting_.front());
  waiting_.pop_front();
  layout::convert_tensor(staged_, {chunk.staged, chunk.staged_origin}, own_, {chunk.blocks, chunk.origin},
                         {chunk.first_token, chunk.tokens}, chunk.layer);
  happened.push_back(Converted{chunk.connection, chunk.pull, chunk.sequence});
  return !waiting_.empty();
}

}  // namespace baton::transfer
