#include <cstdio>
#include <cstring>

#include "tests/check.h"

// Runs all tests; with "2/4" those of the third of four parts, which may run side by side; with another argument those
// whose name contains it.
int main(int count, char** arguments) {
  size_t part = 0, parts = 1, number = 0;
  const char* wanted = count > 1 ? arguments[1] : "";
  if (std::sscanf(wanted, "%zu/%zu", &part, &parts) == 2) wanted = "";
  if (part >= parts) return std::fprintf(stderr, "%s: there is no such part\n", arguments[1]), 2;
  int failed = 0;
  for (const auto& test : baton::tests::all_tests()) {
    if (number++ % parts != part || std::strstr(test.name.c_str(), wanted) == nullptr) continue;
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
