// Limits of this machine, measured without the transfer agent: the yardsticks of baton_native.bench.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Indexes = std::vector<std::uint32_t>;

constexpr std::size_t kBytesPerRead = 512 << 10;  // The size of the agent's chunks.

void check_lengths(const Indexes& to, const Indexes& from) {
  if (to.size() != from.size()) throw std::invalid_argument("as many blocks are needed on both sides");
}

void copy_blocks(std::uintptr_t to, std::uintptr_t from, const Indexes& to_blocks, const Indexes& from_blocks,
                 std::size_t block_bytes) {
  check_lengths(to_blocks, from_blocks);
  for (std::size_t i = 0; i < to_blocks.size(); ++i) {
    std::memcpy(reinterpret_cast<void*>(to + to_blocks[i] * block_bytes),
                reinterpret_cast<const void*>(from + from_blocks[i] * block_bytes), block_bytes);
  }
}

void read_blocks(int pid, std::uintptr_t to, std::uintptr_t from, const Indexes& to_blocks, const Indexes& from_blocks,
                 std::size_t block_bytes) {
  check_lengths(to_blocks, from_blocks);
  const std::size_t batch = std::max<std::size_t>(1, kBytesPerRead / block_bytes);
  std::vector<iovec> local, remote;
  for (std::size_t i = 0; i < to_blocks.size(); ++i) {
    local.push_back({reinterpret_cast<void*>(to + to_blocks[i] * block_bytes), block_bytes});
    remote.push_back({reinterpret_cast<void*>(from + from_blocks[i] * block_bytes), block_bytes});
    if (local.size() < batch && i + 1 < to_blocks.size()) continue;
    const auto expected = static_cast<ssize_t>(local.size() * block_bytes);
    if (::process_vm_readv(pid, local.data(), local.size(), remote.data(), remote.size(), 0) != expected) {
      throw std::system_error(errno, std::generic_category(), "process_vm_readv");
    }
    local.clear();
    remote.clear();
  }
}

}  // namespace

void bind_limits(nb::module_& m) {
  m.def("copy_blocks", &copy_blocks, "to"_a, "from_"_a, "to_blocks"_a, "from_blocks"_a, "block_bytes"_a,
        nb::call_guard<nb::gil_scoped_release>(), "Copy blocks with memcpy, one by one.");
  m.def("read_blocks", &read_blocks, "pid"_a, "to"_a, "from_"_a, "to_blocks"_a, "from_blocks"_a, "block_bytes"_a,
        nb::call_guard<nb::gil_scoped_release>(), "Copy blocks out of another process with process_vm_readv.");
}
