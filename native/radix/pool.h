// Records by number, in chunks that never move: a number stays valid while the pool grows.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace baton::radix {

template <class Record>
class Pool {
 public:
  Record& operator[](std::uint32_t number) { return chunks_[number / kChunk][number % kChunk]; }
  const Record& operator[](std::uint32_t number) const { return chunks_[number / kChunk][number % kChunk]; }

  // Makes room for kChunk records; readers may run meanwhile. `take` then allocates only, rarely, the list of chunks.
  void prepare() {
    if (spare_ == nullptr) spare_ = std::make_unique<Record[]>(kChunk);
  }

  std::uint32_t take() {
    if (!free_.empty()) {
      const std::uint32_t number = free_.back();
      free_.pop_back();
      return number;
    }
    if (next_ == chunks_.size() * kChunk) {
      prepare();
      chunks_.push_back(std::move(spare_));
    }
    return next_++;
  }

  void give(std::uint32_t number) {
    (*this)[number] = Record{};
    free_.push_back(number);
  }

  // Upper bound of all numbers ever taken.
  std::uint32_t end() const { return next_; }
  std::size_t size() const { return next_ - free_.size(); }
  std::size_t bytes() const {
    return (chunks_.size() + (spare_ ? 1 : 0)) * kChunk * sizeof(Record) + chunks_.size() * sizeof(chunks_[0]) +
           free_.capacity() * sizeof(free_[0]);
  }

 private:
  static constexpr std::uint32_t kChunk = 1024;

  std::vector<std::unique_ptr<Record[]>> chunks_;
  std::unique_ptr<Record[]> spare_;
  std::vector<std::uint32_t> free_;
  std::uint32_t next_ = 0;
};

}  // namespace baton::radix
