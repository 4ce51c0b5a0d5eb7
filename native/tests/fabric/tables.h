// Folder that the stand-ins for hardware share: one with a file of words that tests set, and one file of counts for
// each process.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace baton::tests {

using Word = std::atomic<std::int32_t>;

// A caller did what the real thing answers by a hang, a crash or silent damage.
[[noreturn]] inline void misused(const char* what) {
  std::fprintf(stderr, "stand-in: %s\n", what);
  std::abort();
}

template <class T>
T* map_file(const std::string& path, int flags) {
  const int fd = ::open(path.c_str(), flags | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return nullptr;
  void* at = (flags & O_CREAT) == 0 || ::ftruncate(fd, sizeof(T)) == 0
                 ? ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                 : MAP_FAILED;
  ::close(fd);
  return at == MAP_FAILED ? nullptr : static_cast<T*>(at);
}

inline std::string folder_of(const char* variable) {
  const char* folder = std::getenv(variable);
  if (folder == nullptr) misused((std::string(variable) + " is not set").c_str());
  return folder;
}

}  // namespace baton::tests
