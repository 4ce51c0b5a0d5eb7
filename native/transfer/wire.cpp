#include "transfer/wire.h"

#include <algorithm>

namespace baton::transfer {

void Writer::put(const std::string& text) {
  const std::size_t size = std::min(text.size(), kTextBytesMax);
  put(static_cast<std::uint16_t>(size));
  out_.insert(out_.end(), text.begin(), text.begin() + static_cast<std::ptrdiff_t>(size));
}

void Writer::put(const Blob& blob) {
  const std::size_t size = std::min(blob.size(), kBlobBytesMax);
  put(static_cast<std::uint16_t>(size));
  out_.insert(out_.end(), blob.begin(), blob.begin() + static_cast<std::ptrdiff_t>(size));
}

Bytes Reader::take(std::size_t size) {
  if (size > rest_.size()) ok_ = false;
  if (!ok_) return {};
  const Bytes taken = rest_.first(size);
  rest_ = rest_.subspan(size);
  return taken;
}

void Reader::get(bool& value) {
  std::uint8_t byte = 0;
  get(byte);
  if (byte > 1) ok_ = false;
  value = byte == 1;
}

void Reader::get(Cause& value) {
  std::uint8_t byte = 0;
  get(byte);
  if (byte >= kCauses) ok_ = false;
  value = ok_ ? static_cast<Cause>(byte) : Cause::none;
}

void Reader::get(std::string& text) {
  std::uint16_t size = 0;
  get(size);
  if (size > kTextBytesMax) ok_ = false;
  const Bytes taken = take(size);
  text.assign(taken.begin(), taken.end());
}

void Reader::get(Blob& blob) {
  std::uint16_t size = 0;
  get(size);
  if (size > kBlobBytesMax) ok_ = false;
  const Bytes taken = take(size);
  blob.assign(taken.begin(), taken.end());
}

}  // namespace baton::transfer
