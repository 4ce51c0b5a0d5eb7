// Memory that other processes of this host can map: a pool in it can be read without the kernel's help.
//
//   | token, 32 bytes | rest of a page | the memory |
//
// It has no name, so nothing is left behind when its process is killed. It cannot shrink, so a process that maps it
// never gets a SIGBUS.
#pragma once

#include <cstdint>
#include <memory>

#include "transfer/events.h"

namespace baton::transfer {

class Region {
 public:
  static constexpr std::size_t kHeaderBytes = 4096;
  static constexpr std::size_t kTokenBytes = 32;

  // Throws std::invalid_argument or std::system_error.
  [[nodiscard]] static std::shared_ptr<Region> create(std::uint64_t bytes);
  // Maps another process's region for reading; null, with `errno` set, on failure.
  [[nodiscard]] static std::shared_ptr<Region> open(int pid, int fd, std::uint64_t bytes);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  [[nodiscard]] std::uint8_t* data() const { return memory_ + kHeaderBytes; }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] Blob token() const { return {memory_, memory_ + kTokenBytes}; }

 private:
  Region(int fd, std::uint64_t bytes) : fd_(fd), bytes_(bytes) {}
  [[nodiscard]] bool map(int protection);

  int fd_;
  std::uint64_t bytes_;
  std::uint8_t* memory_ = nullptr;
};

}  // namespace baton::transfer
