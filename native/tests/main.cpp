#include <cstring>

#include "tests/check.h"

// Runs all tests, or those whose name contains the argument.
int main(int count, char** arguments) {
  int failed = 0;
  for (const auto& test : baton::tests::all_tests()) {
    if (count > 1 && std::strstr(test.name.c_str(), arguments[1]) == nullptr) continue;
    try {
      test.body();
      std::printf("ok      %s\n", test.name.c_str());
    } catch (const std::exception& error) {
      std::printf("FAILED  %s: %s\n", test.name.c_str(), error.what());
      ++failed;
    }
    std::fflush(stdout);
  }
  return failed == 0 ? 0 : 1;
}
