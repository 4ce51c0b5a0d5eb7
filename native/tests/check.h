// The smallest test framework that names what failed: tests register themselves, main.cpp runs them.
#pragma once

#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace baton::tests {

struct Test {
  std::string name;
  std::function<void()> body;
};

inline std::vector<Test>& all_tests() {
  static std::vector<Test> tests;
  return tests;
}

struct Registration {
  Registration(const char* name, std::function<void()> body) { all_tests().push_back({name, std::move(body)}); }
};

inline void check(bool good, const char* what, const char* file, int line) {
  if (!good) throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

}  // namespace baton::tests

#define TEST(name)                                                          \
  static void name();                                                       \
  static const baton::tests::Registration registration_##name(#name, name); \
  static void name()
#define CHECK(condition) baton::tests::check(static_cast<bool>(condition), #condition, __FILE__, __LINE__)
