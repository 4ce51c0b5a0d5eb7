// Memory of CUDA devices, for tests and benchmarks: engines bring their own.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "gpu/device.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace baton::gpu;

namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

// Throws where [offset, offset + size) does not lie in the memory.
std::uint64_t at(const Memory& memory, std::uint64_t offset, std::uint64_t size) {
  if (offset > memory.bytes() || size > memory.bytes() - offset) {
    throw std::invalid_argument("bytes " + std::to_string(offset) + " and the " + std::to_string(size) +
                                " after it do not lie in the memory");
  }
  return memory.address() + offset;
}

}  // namespace

void bind_gpu(nb::module_& m) {
  const nb::exception<Error> error(m, "GpuError", PyExc_RuntimeError);
  nb::exception<Unavailable>(m, "GpuUnavailable", error.ptr());
  nb::class_<Memory>(m, "DeviceMemory")
      .def(
          "__init__",
          [](Memory* self, std::uint64_t size, int device, const std::string& library) {
            if (size == 0) throw std::invalid_argument("memory has at least one byte");
            new (self) Memory(std::make_shared<Device>(library, device), size);
          },
          "size"_a, "device"_a = 0, "library"_a = "", Unlocked())
      .def_prop_ro("address", &Memory::address)
      .def_prop_ro("bytes", &Memory::bytes)
      .def_prop_ro("device", [](const Memory& memory) { return memory.device().name(); })
      .def(
          "read",
          [](const Memory& memory, std::uint64_t offset, std::uint64_t size) {
            const std::uint64_t from = at(memory, offset, size);
            nb::bytes out(nullptr, size);
            auto* const to = PyBytes_AsString(out.ptr());
            const nb::gil_scoped_release unlocked;
            memory.device().copy(reinterpret_cast<std::uint64_t>(to), from, size);
            return out;
          },
          "offset"_a, "size"_a)
      .def(
          "write",
          [](const Memory& memory, std::uint64_t offset, const nb::bytes& data) {
            const std::uint64_t to = at(memory, offset, data.size());
            const auto from = reinterpret_cast<std::uint64_t>(data.data());
            const std::size_t size = data.size();
            const nb::gil_scoped_release unlocked;
            memory.device().copy(to, from, size);
          },
          "offset"_a, "data"_a)
      .def(
          "copy_from",
          [](const Memory& to, const Memory& from, std::uint64_t size) {
            to.device().copy(at(to, 0, size), at(from, 0, size), size);
          },
          "other"_a, "size"_a, Unlocked())
      .def(
          "copy_to_host",
          [](const Memory& memory, std::uint64_t offset, std::uint64_t host, std::uint64_t size) {
            memory.device().copy(host, at(memory, offset, size), size);
          },
          "offset"_a, "host"_a, "size"_a, Unlocked())
      .def(
          "copy_from_host",
          [](const Memory& memory, std::uint64_t offset, std::uint64_t host, std::uint64_t size) {
            memory.device().copy(at(memory, offset, size), host, size);
          },
          "offset"_a, "host"_a, "size"_a, Unlocked())
      .def(
          "fill",
          [](const Memory& memory, std::uint64_t offset, std::uint64_t size, std::uint8_t value) {
            memory.device().fill(at(memory, offset, size), value, size);
          },
          "offset"_a, "size"_a, "value"_a, Unlocked());
}
