#include "transfer/cuda_path.h"

#include <stdexcept>

namespace baton::transfer {

CudaPool& cuda_pool(const Site& site) {
  if (site.fabrics.cuda == nullptr) throw std::runtime_error("it is none of this agent's backends");
  (void)site.fabrics.cuda->device();
  if (site.chunk_bytes_max > UINT32_MAX) throw std::runtime_error("blocks are too large");
  return *site.fabrics.cuda;
}

void prepare_cuda(const FabricOptions& options, const Pool& pool, Fabrics& fabrics) {
  if (fabrics.cuda == nullptr) fabrics.cuda = std::make_shared<CudaPool>(options, pool);
}

// ---------------------------------------------------------------- the source's side

void CudaServing::stop_serving(PullId pull) {
  std::erase_if(waiting_, [&](const Serving& serving) {
    if (serving.chunk.pull == pull) dropped(serving);
    return serving.chunk.pull == pull;
  });
  for (Serving& serving : moving_) serving.stopped = serving.stopped || serving.chunk.pull == pull;
}

DataPath::Turn CudaServing::advance() {
  try {
    ended_.clear();
    queue_.take(ended_);
    for (const gpu::Queue::Ended& ended : ended_) judge(ended);
    begin_all();
    queue_.launch(checksum_);
    return Turn::idle;
  } catch (const std::runtime_error& error) {
    why_ = error.what();
    return Turn::broken;
  }
}

void CudaServing::judge(const gpu::Queue::Ended& ended) {
  if (ended.result.outcome == BATON_GPU_STALE) throw std::runtime_error("the sink does not take this path any more");
  const bool moved = ended.result.outcome == BATON_GPU_MOVED;
  if (ended.tag == nullptr) return proven();
  Serving& serving = *static_cast<Serving*>(ended.tag);
  if (!moved && !serving.stopped) return waiting_.splice(waiting_.end(), moving_, serving.self);
  if (serving.stopped) {
    dropped(serving);
  } else {
    const std::uint32_t falsified = serving.chunk.corruption == Corruption::none ? 0 : 0x10;
    served(serving, checksum_ ? ended.result.sum ^ falsified : 0);
  }
  moving_.erase(serving.self);
}

void CudaServing::begin_all() {
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    Serving& serving = *at;
    serving.self = at++;
    if (!queue_.has_room(serving.chunk.blocks.size())) return;
    BatonGpuGate gate{.release = serving.chunk.released == 0 ? 0 : cuda_.released_address(),
                      .release_min = serving.chunk.released};
    std::uint64_t dense = 0;
    const Way way = direct(serving, gate, dense);
    if (way == Way::later) continue;
    if (way == Way::served) {
      waiting_.erase(serving.self);
      continue;
    }
    moving_.splice(moving_.end(), waiting_, serving.self);
    queue_.add(gate, cuda_pieces(site_.pool, serving.chunk.layer, serving.chunk.blocks, dense), &serving);
  }
}

// ---------------------------------------------------------------- the sink's side

void CudaPlacing::prove(std::uint64_t token_address, const BatonGpuGate& gate) {
  proof_address_ = token_address;
  proof_gate_ = gate;
  const BatonGpuPiece piece{
      .from = token_address, .to = queue_.scratch(), .row_bytes = sizeof(Token), .rows = 1, .groups = 1};
  queue_.add(gate, {&piece, 1}, nullptr);
}

std::optional<Blob> CudaPlacing::proof() const {
  return token_ ? std::optional(Blob(token_->begin(), token_->end())) : std::nullopt;
}

bool CudaPlacing::poll() {
  ended_.clear();
  queue_.take(ended_);
  for (const auto& [tag, result] : ended_) {
    if (tag != nullptr) {
      Read& read = *static_cast<Read*>(tag);
      read.sum = result.sum;
      if (result.outcome == BATON_GPU_MOVED) {
        ended(read, read.begun);
      } else {
        undo(read, result.outcome == BATON_GPU_NOT_READY);
      }
    } else if (result.outcome == BATON_GPU_MOVED) {
      cuda_.device()->copy(reinterpret_cast<std::uint64_t>(token_.emplace().data()), queue_.scratch(), sizeof(Token));
    } else {
      prove(proof_address_, proof_gate_);
    }
  }
  return true;
}

bool CudaPlacing::begin(Read& read) {
  const auto& [local, remote] = read.pieces;
  if (!queue_.has_room(local.size())) return true;
  std::vector<BatonGpuPiece> pieces;
  std::uint64_t position = 0;
  for (std::size_t i = 0; i < local.size(); ++i) {
    pieces.push_back({.from = reinterpret_cast<std::uint64_t>(remote[i].iov_base),
                      .to = reinterpret_cast<std::uint64_t>(local[i].iov_base),
                      .row_bytes = static_cast<std::uint32_t>(local[i].iov_len),
                      .rows = 1,
                      .groups = 1,
                      .position = position});
    position += local[i].iov_len;
  }
  queue_.add(gate_of(read), pieces, &read);
  read.begun = local.size();
  return true;
}

DataPath::Turn CudaPlacing::advance() {
  try {
    const Turn turn = ReadingSink::advance();
    queue_.launch(checksum_);
    return turn;
  } catch (const std::runtime_error& error) {
    why_ = error.what();
    return Turn::broken;
  }
}

}  // namespace baton::transfer
