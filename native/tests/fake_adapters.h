// The fake adapters of tests/fabric meet in a folder, which also tells them what to do (see Control there).
#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace baton::tests {

class FakeAdapters {
 public:
  FakeAdapters() {
    char folder[] = "/tmp/fake-verbs-XXXXXX";
    if (::mkdtemp(folder) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = folder;
    ::setenv("FAKE_VERBS_DIR", folder, 1);
  }
  ~FakeAdapters() { std::filesystem::remove_all(path_); }
  // Operations do not begin while they are held.
  void hold(std::int32_t held) const {
    static constexpr std::streamoff kHold = 4 * sizeof held;
    std::fstream control(path_ / "control", std::ios::binary | std::ios::in | std::ios::out);
    if (!control.seekp(kHold).write(reinterpret_cast<const char*>(&held), sizeof held)) {
      throw std::runtime_error("no adapter is open");
    }
  }

 private:
  std::filesystem::path path_;
};

inline const FakeAdapters kAdapters;

}  // namespace baton::tests
