// The same plans for a GPU: moves as strided pieces, which its kernel takes as they are (gpu/baton_gpu.h).
//
//   split NHD, 16 tokens a block                        fused HND, 32 tokens a block
//   K [t0 h0][t0 h1][t1 h0][t1 h1] …          ──▶       [h0: t0 K,V][h0: t1 K,V] … [h1: t0 K,V] …
//   one piece for each run of tokens within both blocks: groups are heads, rows are tokens
//
// Only rows: packed blocks are a CPU's, and are converted there.
#pragma once

#include "gpu/device.h"
#include "layout/convert.h"

namespace baton::layout {

// Carries nothing out, but notes what a device has to move. Throws Invalid where that is not whole, aligned 16 bytes.
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

// Moves all pieces and waits for them. Throws gpu::Error, also where that takes longer than `budget_s`: then the queue
// must go before the memory does. Returns the nanoseconds that it took the device.
std::uint64_t move_all(gpu::Queue& queue, std::span<const BatonGpuPiece> pieces, double budget_s);

}  // namespace baton::layout
