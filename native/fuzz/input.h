// A fuzz target's input, decoded from bytes: numbers, blobs, and well-formed frames with any content.
#pragma once

#include <cstdlib>
#include <span>
#include <tuple>

#include "transfer/wire.h"

namespace baton::fuzz {

using namespace baton::transfer;

// Checks a condition that must hold whatever a peer sends.
inline void require(bool good) {
  if (!good) std::abort();
}

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : rest_(data, size) {}
  [[nodiscard]] bool empty() const { return rest_.empty(); }
  std::uint8_t byte() {
    if (rest_.empty()) return 0;
    const std::uint8_t first = rest_.front();
    rest_ = rest_.subspan(1);
    return first;
  }
  Blob blob(std::size_t size) {
    const Bytes taken = rest_.first(std::min(size, rest_.size()));
    rest_ = rest_.subspan(taken.size());
    return {taken.begin(), taken.end()};
  }

  void fill(bool& value) { value = byte() % 2 == 1; }
  void fill(Cause& value) { value = static_cast<Cause>(byte() % kCauses); }
  void fill(std::string& text) {
    const Blob bytes = blob(byte());
    text.assign(bytes.begin(), bytes.end());
  }
  void fill(Blob& bytes) { bytes = blob(byte()); }
  template <std::size_t N>
  void fill(std::array<std::uint8_t, N>& bytes) {
    bytes = {};
    bytes[0] = byte();
  }
  // Small as a rule, since small numbers name what exists; 255 announces one of any size.
  template <class T>
    requires std::is_integral_v<T>
  void fill(T& value) {
    const std::uint8_t first = byte();
    value = static_cast<T>(first);
    if (first != 255) return;
    const Blob bytes = blob(sizeof(T));
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<std::uint8_t*>(&value));
  }
  template <class Frame>
  Frame frame() {
    Frame frame;
    std::apply([&](auto&... field) { (fill(field), ...); }, frame.fields());
    return frame;
  }

 private:
  Bytes rest_;
};

// A frame without its length, as the core gets it.
template <class Frame>
Blob body(Frame frame) {
  Blob bytes = encode(std::move(frame));
  bytes.erase(bytes.begin(), bytes.begin() + kLengthBytes);
  return bytes;
}

// One of several kinds of frames, filled from the input.
template <class... Frames>
Blob any_frame(Input& input) {
  const std::size_t kind = input.byte() % sizeof...(Frames);
  Blob bytes;
  std::size_t at = 0;
  ((at++ == kind ? void(bytes = body(input.frame<Frames>())) : void()), ...);
  return bytes;
}

}  // namespace baton::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
