// Folder that the stand-ins for hardware share: one with a file of words that tests set, and one file of counts for
// each process.
#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

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

// A symbol of a library that this process has loaded and whose name contains `part`: of another stand-in. Null: none.
inline void* find_loaded(const char* part, const char* symbol) {
  const auto add = [](dl_phdr_info* info, std::size_t, void* names) {
    static_cast<std::vector<std::string>*>(names)->emplace_back(info->dlpi_name);
    return 0;
  };
  std::vector<std::string> loaded;
  ::dl_iterate_phdr(add, &loaded);
  for (const std::string& name : loaded) {
    if (name.find(part) == std::string::npos) continue;
    void* const library = ::dlopen(name.c_str(), RTLD_NOLOAD | RTLD_LAZY);
    void* const found = library == nullptr ? nullptr : ::dlsym(library, symbol);
    if (found != nullptr) return found;
  }
  return nullptr;
}

inline std::string folder_of(const char* variable) {
  const char* folder = std::getenv(variable);
  if (folder == nullptr) misused((std::string(variable) + " is not set").c_str());
  return folder;
}

}  // namespace baton::tests
