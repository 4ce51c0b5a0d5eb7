// The list of all ways, and what those have in common that copy.
#include <algorithm>
#include <utility>

#include "transfer/data_path.h"

namespace baton::transfer {

std::span<const Backend* const> backends() {
  static constexpr const Backend* kAll[] = {&kCudaIpc, &kCudaPut, &kGpuDirect, &kDirect, &kRing,
                                            &kCma,     &kVerbs,   &kUcx,       &kTcp};
  return kAll;
}

const Backend* find_backend(std::string_view name) {
  for (const Backend* backend : backends()) {
    if (backend->name == name) return backend;
  }
  return nullptr;
}

void CopyingPath::stop_serving(PullId pull) {
  std::erase_if(serving_, [&](const Serve& chunk) { return chunk.pull == pull; });
}

bool CopyingPath::place(const Place& chunk) {
  placing_.push_back(chunk);
  return true;
}

void CopyingPath::stop_placing(PullId pull) {
  std::erase_if(placing_, [&](const Place& chunk) {
    if (chunk.pull != pull) return false;
    site_.happened.push_back(Placed{site_.connection, pull, chunk.sequence, chunk.slot, 0});  // Its slot is empty.
    return true;
  });
}

DataPath::Turn CopyingPath::advance() {
  if (!placing_.empty()) {
    const Place chunk = std::move(placing_.front());
    placing_.pop_front();
    std::uint32_t crc = 0;
    if (!place_now(chunk, crc)) return Turn::broken;
    site_.happened.push_back(Placed{site_.connection, chunk.pull, chunk.sequence, chunk.slot, crc});
  } else if (!serving_.empty() && can_serve()) {
    const Serve chunk = std::move(serving_.front());
    serving_.pop_front();
    serve_now(chunk);
  }
  return !placing_.empty() || (!serving_.empty() && can_serve()) ? Turn::more : Turn::idle;
}

}  // namespace baton::transfer
