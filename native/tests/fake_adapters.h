// The fake hardware of tests/fabric meets in a folder.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace baton::tests {

// A folder that an environment variable names until this object ends.
class FakeFolder {
 public:
  explicit FakeFolder(const char* variable) {
    char folder[] = "/tmp/fake-fabric-XXXXXX";
    if (::mkdtemp(folder) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = folder;
    ::setenv(variable, folder, 1);
  }
  FakeFolder(const FakeFolder&) = delete;
  FakeFolder& operator=(const FakeFolder&) = delete;
  ~FakeFolder() { std::filesystem::remove_all(path_); }

 protected:
  std::filesystem::path path_;
};

// The folder of the adapters also tells them what to do (see Control there).
class FakeAdapters : public FakeFolder {
 public:
  FakeAdapters() : FakeFolder("FAKE_VERBS_DIR") {}
  // Operations do not begin while they are held.
  void hold(std::int32_t held) const {
    static constexpr std::streamoff kHold = 4 * sizeof held;
    std::fstream control(path_ / "control", std::ios::binary | std::ios::in | std::ios::out);
    if (!control.seekp(kHold).write(reinterpret_cast<const char*>(&held), sizeof held)) {
      throw std::runtime_error("no adapter is open");
    }
  }
  // Writes of this process's adapters into a GPU's memory that the GPU does not see yet.
  [[nodiscard]] std::int32_t unflushed() const {
    std::int32_t count = 0;
    static constexpr std::streamoff kUnflushed = 6 * sizeof count;
    std::ifstream table(path_ / std::to_string(::getpid()), std::ios::binary);
    if (!table.seekg(kUnflushed).read(reinterpret_cast<char*>(&count), sizeof count)) {
      throw std::runtime_error("no adapter is open");
    }
    return count;
  }
};

inline const FakeAdapters kAdapters;

}  // namespace baton::tests
