// Runs the transfer agent's state machine in a simulated world: `baton_model [--operations N] [--seed S] [--trace]`.
//
// Seed after seed, each with some hundred random operations and then the end of everything, until N operations were
// done. A failing seed is shrunk to the operations that matter, and those are printed with all that came of them.
#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "tests/model/world.h"

using namespace baton::model;

namespace {

constexpr std::uint64_t kOperationsPerSeed = 500;

// Events that a long run must have met; else it proves less than it seems to.
constexpr const char* kExpected[] = {"done none by direct, restarted",
                                     "done none by shm, restarted",
                                     "done none by tcp, restarted",
                                     "failed cancelled",
                                     "failed deadline",
                                     "failed unreachable",
                                     "failed refused",
                                     "failed revoked",
                                     "failed expired",
                                     "failed checksum",
                                     "failed stalled",
                                     "released none",
                                     "ended cancelled",
                                     "ended expired",
                                     "ended revoked",
                                     "closed: nothing came on it while others got on"};

struct Outcome {
  std::string violation;  // Empty: all is well.
  std::uint64_t digest = 0;
};

Outcome run(std::uint64_t seed, const std::vector<std::uint64_t>& operations, Seen& seen, bool trace) {
  std::function<void(const std::string&)> print;
  if (trace) print = [](const std::string& line) { std::printf("  %s\n", line.c_str()); };
  World world(seed, seen, print);
  try {
    for (const std::uint64_t operation : operations) world.operate(operation);
    world.finish();
  } catch (const std::exception& error) {
    return {error.what(), world.digest()};
  }
  return {"", world.digest()};
}

// Leaves out whatever the failure does not need: halves first, single operations last.
std::vector<std::uint64_t> shrink(std::uint64_t seed, std::vector<std::uint64_t> operations) {
  Seen seen;
  for (std::size_t size = operations.size() / 2; size > 0; size /= 2) {
    for (std::size_t begin = 0; begin < operations.size();) {
      std::vector<std::uint64_t> fewer = operations;
      const auto from = fewer.begin() + static_cast<std::ptrdiff_t>(begin);
      fewer.erase(from, from + static_cast<std::ptrdiff_t>(std::min(size, fewer.size() - begin)));
      if (run(seed, fewer, seen, false).violation.empty()) {
        begin += size;
      } else {
        operations = std::move(fewer);
      }
    }
  }
  return operations;
}

std::vector<std::uint64_t> all_operations() {
  std::vector<std::uint64_t> operations(kOperationsPerSeed);
  for (std::uint64_t i = 0; i < operations.size(); ++i) operations[i] = i;
  return operations;
}

int explain(std::uint64_t seed, const std::string& violation) {
  std::printf("seed %" PRIu64 ": %s\n", seed, violation.c_str());
  const auto operations = shrink(seed, all_operations());
  std::printf("shrunk to %zu operations; again with: baton_model --seed %" PRIu64 "\n", operations.size(), seed);
  Seen seen;
  std::printf("  %s\n", run(seed, operations, seen, true).violation.c_str());
  return 1;
}

bool number_after(const char* name, int count, char** arguments, std::uint64_t& value) {
  for (int i = 1; i + 1 < count; ++i) {
    if (std::strcmp(arguments[i], name) != 0) continue;
    value = std::strtoull(arguments[i + 1], nullptr, 10);
    return true;
  }
  return false;
}

}  // namespace

bool has(char** arguments, int count, const char* name) {
  return std::any_of(arguments, arguments + count,
                     [&](const char* argument) { return std::strcmp(argument, name) == 0; });
}

int main(int count, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::uint64_t wanted = 10'000, seed = 0;
  number_after("--operations", count, arguments, wanted);
  Seen seen;
  if (number_after("--seed", count, arguments, seed)) {
    const Outcome outcome = run(seed, all_operations(), seen, false);
    if (!outcome.violation.empty()) return explain(seed, outcome.violation);
    if (has(arguments, count, "--trace")) (void)run(seed, all_operations(), seen, true);
    std::printf("seed %" PRIu64 " holds\n", seed);
    return 0;
  }
  const auto began = std::chrono::steady_clock::now();
  for (seed = 0; seed * kOperationsPerSeed < wanted; ++seed) {
    const Outcome outcome = run(seed, all_operations(), seen, false);
    if (!outcome.violation.empty()) return explain(seed, outcome.violation);
    Seen again;
    if (seed < 3 && run(seed, all_operations(), again, false).digest != outcome.digest) {
      return std::printf("seed %" PRIu64 ": equal events gave other actions\n", seed), 1;
    }
  }
  for (const auto& [what, times] : seen) std::printf("%8" PRIu64 "  %s\n", times, what.c_str());
  for (const char* what : kExpected) {
    if (wanted >= 100'000 && !seen.contains(what)) return std::printf("never seen: %s\n", what), 1;
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  std::printf("%" PRIu64 " operations, seeds 0 to %" PRIu64 ", in %.1f s\n", seed * kOperationsPerSeed, seed - 1,
              took.count());
  return 0;
}
