// Plans for a GPU: moves as strided pieces, the input of its kernel (gpu/baton_gpu.h).
//
//   split NHD, 16 tokens a block                        fused HND, 32 tokens a block
//   K [t0 h0][t0 h1][t1 h0][t1 h1] …          ──▶       [h0: t0 K,V][h0: t1 K,V] … [h1: t0 K,V] …
//   one piece for each run of tokens within both blocks: groups are heads, rows are tokens
//
// Only grids of rows are supported: packed blocks belong to CPUs and are converted there.
#pragma once

#include "gpu/device.h"
#include "layout/convert.h"

namespace baton::layout {

// Records the pieces for a device to move and copies nothing. Throws Invalid unless all are whole, aligned 16 bytes.
class PieceList {
 public:
  void operator()(const Side& source, const Side& sink, std::span<const Move> moves, Heads heads, Planes planes);
  [[nodiscard]] const std::vector<BatonGpuPiece>& pieces() const { return pieces_; }

 private:
  void add_blocks(const Side& source, const Side& sink, const Move& move);
  void add_rows(const Side& source, const Side& sink, const Move& move, Heads heads, Planes planes);
  void add(BatonGpuPiece piece);

  std::vector<BatonGpuPiece> pieces_;
};

// Moves all pieces and waits for them. Throws gpu::Error, also if that takes longer than `budget_s`: then the queue
// must be destroyed before the memory. Returns the device's time in nanoseconds.
std::uint64_t move_all(gpu::Queue& queue, std::span<const BatonGpuPiece> pieces, double budget_s);

}  // namespace baton::layout
