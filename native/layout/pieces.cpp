#include "layout/pieces.h"

#include <poll.h>

#include <algorithm>
#include <chrono>

namespace baton::layout {
namespace {

// Start of a head's part of a token's row on one side.
std::uint64_t row_at(const Side& side, const Grid& grid, std::uint32_t head, std::uint32_t block, std::uint32_t token) {
  return reinterpret_cast<std::uint64_t>(side.tensors[grid.tensor]) + block * side.stride + grid.origin +
         (head - side.block.heads.first) * grid.head_stride + token * grid.token.inner;
}

// Whether V follows K in the same row.
bool is_fused(const Block& block) {
  return block.planes == 2 && block.grids[0].tensor == block.grids[1].tensor &&
         block.grids[1].origin == block.grids[0].origin + block.row_bytes();
}

}  // namespace

void PieceList::operator()(const Side& source, const Side& sink, std::span<const Move> moves, Heads heads,
                           Planes planes) {
  for (const Move& move : moves) {
    if (move.whole) {
      add_blocks(source, sink, move);
    } else {
      add_rows(source, sink, move, heads, planes);
    }
  }
}

void PieceList::add_blocks(const Side& source, const Side& sink, const Move& move) {
  for (std::uint32_t tensor = 0; tensor < source.block.tensors; ++tensor) {
    add({.from = reinterpret_cast<std::uint64_t>(source.tensors[tensor]) + move.source_block * source.stride,
         .to = reinterpret_cast<std::uint64_t>(sink.tensors[tensor]) + move.sink_block * sink.stride,
         .from_row = source.stride,
         .to_row = sink.stride,
         .row_bytes = static_cast<std::uint32_t>(source.block.bytes),
         .rows = move.tokens / source.block.tokens,
         .groups = 1});
  }
}

void PieceList::add_rows(const Side& source, const Side& sink, const Move& move, Heads heads, Planes planes) {
  // Where both sides have K and V side by side, a row is both.
  const bool both = planes.size() == 2 && is_fused(source.block) && is_fused(sink.block);
  for (const auto& [source_plane, sink_plane] : planes.first(both ? 1 : planes.size())) {
    const Grid& from = source.block.grids[source_plane];
    const Grid& to = sink.block.grids[sink_plane];
    if (from.cells != Cells::rows || to.cells != Cells::rows) throw Invalid("packed blocks are converted by the host");
    const std::uint64_t row_bytes = source.block.row_bytes() * (both ? 2 : 1);
    for (std::uint32_t done = 0; done < move.tokens;) {
      // A move runs on into the blocks that follow by number; a piece ends where a block of either side does.
      const std::uint32_t read = move.source_token + done, write = move.sink_token + done;
      const std::uint32_t tokens = std::min({move.tokens - done, source.block.tokens - read % source.block.tokens,
                                             sink.block.tokens - write % sink.block.tokens});
      add({.from = row_at(source, from, heads.first, move.source_block + read / source.block.tokens,
                          read % source.block.tokens),
           .to = row_at(sink, to, heads.first, move.sink_block + write / sink.block.tokens, write % sink.block.tokens),
           .from_row = from.token.inner,
           .to_row = to.token.inner,
           .from_group = from.head_stride,
           .to_group = to.head_stride,
           .row_bytes = static_cast<std::uint32_t>(row_bytes),
           .rows = tokens,
           .groups = heads.count});
      done += tokens;
    }
  }
}

// Rows without gaps between them become one, since the kernel is fastest with long rows.
void PieceList::add(BatonGpuPiece piece) {
  // Tokens whose heads lie side by side are long rows, too, if heads are taken first.
  if (piece.groups > 1 && piece.from_group == piece.row_bytes && piece.to_group == piece.row_bytes) {
    piece.row_bytes *= std::exchange(piece.groups, 1);
  }
  if (piece.rows == 1 || (piece.from_row == piece.row_bytes && piece.to_row == piece.row_bytes)) {
    piece.row_bytes *= std::exchange(piece.rows, 1);
    piece.from_row = piece.to_row = 0;
  }
  if (piece.groups == 1) {
    piece.from_group = piece.to_group = 0;
  } else if (piece.rows == 1) {  // The groups are what is left: rows.
    piece.rows = std::exchange(piece.groups, 1);
    piece.from_row = std::exchange(piece.from_group, 0);
    piece.to_row = std::exchange(piece.to_group, 0);
  }
  const std::uint64_t all =
      piece.from | piece.to | piece.from_row | piece.to_row | piece.from_group | piece.to_group | piece.row_bytes;
  if (all % BATON_GPU_ALIGN != 0) throw Invalid("a GPU moves whole, aligned 16 bytes, and these rows are not");
  pieces_.push_back(piece);
}

std::uint64_t move_all(gpu::Queue& queue, std::span<const BatonGpuPiece> pieces, double budget_s) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(budget_s);
  const std::uint64_t before_ns = queue.device_ns();
  std::vector<gpu::Queue::Ended> ended;
  const auto wait = [&] {
    queue.launch(false);
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    pollfd waiting{queue.fd(), POLLIN, 0};
    if (left.count() <= 0 || ::poll(&waiting, 1, static_cast<int>(left.count())) == 0) {
      throw gpu::Error("the GPU has not moved this in time");
    }
    queue.take(ended);
  };
  std::size_t added = 0;
  for (std::size_t first = 0; first < pieces.size(); ++added) {
    const std::size_t count = std::min<std::size_t>(pieces.size() - first, BATON_GPU_PIECES_MAX);
    while (!queue.has_room(count)) wait();
    queue.add({}, pieces.subspan(first, count), nullptr);
    queue.launch(false);
    first += count;
  }
  while (ended.size() < added) wait();
  return queue.device_ns() - before_ns;
}

}  // namespace baton::layout
