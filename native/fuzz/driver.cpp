// Runs a fuzz target where there is no libFuzzer: every file of a corpus, then random changes of what it knows.
//
//   fuzz_… CORPUS                          each file once: fails where one makes the target fall
//   fuzz_… CORPUS --seconds S [--seed N]   goes on, guided by what code an input reaches; new ones are kept in CORPUS
//
// The compiler calls `__sanitizer_cov_trace_pc` wherever control flow joins (-fsanitize-coverage=trace-pc). An input
// that makes the target fall is left in the file `crash`.
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include <fcntl.h>
#include <unistd.h>
#include <csignal>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::size_t kEdges = 1 << 16;
constexpr std::size_t kBytesMax = 4096;
constexpr std::size_t kKeptMax = 4096;

std::uint8_t reached[kEdges];  // Edges of this run.
std::uint8_t known[kEdges];    // Edges of all runs.
std::uintptr_t last = 0;
Bytes& running = *new Bytes;  // Outlives all else: leaks are looked for when everything has been destroyed.

// Calls nothing that is unsafe in a signal handler.
void leave_crash() {
  const int fd = ::open("crash", O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  [[maybe_unused]] const auto written = ::write(fd, running.data(), running.size());
  static constexpr char kSaid[] = "the input that did it is in the file `crash`\n";
  [[maybe_unused]] const auto said = ::write(STDERR_FILENO, kSaid, sizeof kSaid - 1);
}

void on_abort(int) {
  leave_crash();
  std::_Exit(1);
}

// Whether the run reached code that none before it reached, or reached it more often by a power of two.
bool run(const Bytes& input) {
  running = input;
  std::memset(reached, 0, sizeof reached);
  last = 0;
  ::alarm(10);  // One that takes so long hangs.
  LLVMFuzzerTestOneInput(running.data(), running.size());
  ::alarm(0);
  bool fresh = false;
  for (std::size_t edge = 0; edge < kEdges; ++edge) {
    std::uint8_t rank = 0;
    for (unsigned count = reached[edge]; count > 0; count >>= 2) ++rank;
    if (rank <= known[edge]) continue;
    known[edge] = rank;
    fresh = true;
  }
  return fresh;
}

void change(Bytes& bytes, const std::vector<Bytes>& corpus, std::mt19937_64& random) {
  const auto below = [&](std::size_t bound) { return static_cast<std::size_t>(random() % bound); };
  const auto place = [&](std::size_t at) { return bytes.begin() + static_cast<std::ptrdiff_t>(at); };
  static constexpr std::uint8_t kTelling[] = {0, 1, 2, 4, 15, 16, 32, 64, 127, 128, 254, 255};
  for (std::size_t changes = 1 + below(6); changes > 0; --changes) {
    const std::size_t at = below(bytes.size() + 1);
    const std::size_t left = bytes.size() - at;
    switch (below(7)) {
      case 0:
        if (left > 0) bytes[at] = static_cast<std::uint8_t>(bytes[at] ^ 1u << below(8));
        break;
      case 1:
        if (left > 0) bytes[at] = kTelling[below(std::size(kTelling))];
        break;
      case 2:
        if (left > 0) bytes[at] = static_cast<std::uint8_t>(random());
        break;
      case 3:
        bytes.insert(place(at), 1 + below(8), static_cast<std::uint8_t>(random()));
        break;
      case 4:
        if (left > 0) bytes.erase(place(at), place(at + 1 + below(std::min<std::size_t>(left, 16))));
        break;
      case 5: {  // A part of itself once more.
        const Bytes part(place(at), place(at + std::min<std::size_t>(left, 1 + below(32))));
        bytes.insert(place(below(bytes.size() + 1)), part.begin(), part.end());
        break;
      }
      default: {  // The end of another.
        const Bytes& other = corpus[below(corpus.size())];
        bytes.resize(at);
        bytes.insert(bytes.end(), other.begin() + static_cast<std::ptrdiff_t>(below(other.size() + 1)), other.end());
      }
    }
  }
  if (bytes.size() > kBytesMax) bytes.resize(kBytesMax);
}

Bytes read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void keep(const std::filesystem::path& folder, const Bytes& input) {
  std::uint64_t name = 0xCBF29CE484222325;
  for (const std::uint8_t byte : input) name = (name ^ byte) * 0x100000001B3;
  char text[17];
  std::snprintf(text, sizeof text, "%016" PRIx64, name);
  std::ofstream(folder / text, std::ios::binary)
      .write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
}

}  // namespace

extern "C" void __sanitizer_cov_trace_pc() {
  const auto at = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0)) >> 1;
  std::uint8_t& edge = reached[(at ^ last) % kEdges];
  if (edge < 255) ++edge;
  last = at >> 1;
}
// Called by a sanitizer before it ends the program.
extern "C" void __sanitizer_set_death_callback(void (*)()) __attribute__((weak));

int main(int count, char** arguments) {
  if (count < 2) return std::fprintf(stderr, "%s CORPUS [--seconds S] [--seed N]\n", arguments[0]), 2;
  double seconds = 0;
  std::mt19937_64 random(1);
  for (int i = 2; i + 1 < count; i += 2) {
    if (std::strcmp(arguments[i], "--seconds") == 0) seconds = std::atof(arguments[i + 1]);
    if (std::strcmp(arguments[i], "--seed") == 0) random.seed(std::strtoull(arguments[i + 1], nullptr, 10));
  }
  std::signal(SIGABRT, on_abort);
  std::signal(SIGALRM, on_abort);
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(leave_crash);
  std::vector<Bytes> corpus;
  for (const auto& entry : std::filesystem::directory_iterator(arguments[1])) corpus.push_back(read(entry.path()));
  for (const Bytes& input : corpus) run(input);
  if (corpus.empty()) corpus.emplace_back();
  std::uint64_t runs = corpus.size();
  const std::size_t before = corpus.size();
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (; seconds > 0 && std::chrono::steady_clock::now() < end; ++runs) {
    Bytes input = corpus[random() % corpus.size()];
    change(input, corpus, random);
    if (!run(input) || corpus.size() >= kKeptMax) continue;
    keep(arguments[1], input);
    corpus.push_back(std::move(input));
  }
  std::printf("%s: %" PRIu64 " inputs, %zu of them new\n", std::filesystem::path(arguments[0]).filename().c_str(), runs,
              corpus.size() - before);
  return 0;
}
