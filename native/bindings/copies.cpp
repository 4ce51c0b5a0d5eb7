// Batches of copies between host memory and a device's.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "gpu/copy_engine.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace baton::gpu;

namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

// Shared, so that a call which runs during `close` still finds its engine.
struct Owner {
  explicit Owner(const MakeBackend& make) : engine(std::make_shared<CopyEngine>(make)) {}
  std::shared_ptr<CopyEngine> engine;
  std::shared_ptr<CopyEngine> get() const {
    if (engine == nullptr) throw Error("the copy engine is closed");
    return engine;
  }
};

}  // namespace

void bind_copies(nb::module_& m) {
  nb::class_<Owner>(m, "CopyEngine")
      .def(
          "__init__",
          [](Owner* self, std::optional<int> device, const std::string& library) {
            new (self)
                Owner(device.has_value() ? device_copies(std::make_shared<Device>(library, *device)) : host_copies());
          },
          "device"_a.none() = nb::none(), "library"_a = "", Unlocked())
      .def("fileno", [](const Owner& self) { return self.get()->fd(); })
      .def(
          "register",
          [](const Owner& self, std::uint64_t address, std::uint64_t size) { self.get()->add_host(address, size); },
          "address"_a, "size"_a, Unlocked())
      .def(
          "unregister", [](const Owner& self, std::uint64_t address) { self.get()->remove_host(address); }, "address"_a,
          Unlocked())
      .def(
          "submit",
          [](const Owner& self, const nb::bytes& copies, std::optional<std::uint64_t> after) {
            if (copies.size() % sizeof(Copy) != 0) throw std::invalid_argument("a copy is three words of 64 bits");
            std::vector<Copy> batch(copies.size() / sizeof(Copy));
            std::memcpy(batch.data(), copies.data(), copies.size());
            const nb::gil_scoped_release unlocked;
            return self.get()->submit(batch, after);
          },
          "copies"_a, "after"_a.none() = nb::none())
      .def("poll",
           [](const Owner& self) {
             std::vector<CopyEngine::Ended> taken;
             {
               const nb::gil_scoped_release unlocked;
               taken = self.get()->take();
             }
             nb::list ended;
             for (const auto& one : taken) ended.append(nb::make_tuple(one.ticket, one.failure));
             return ended;
           })
      .def(
          "wait",
          [](const Owner& self, std::uint64_t ticket, double timeout_s) {
            return self.get()->wait(ticket, std::chrono::nanoseconds(static_cast<std::int64_t>(timeout_s * 1e9)));
          },
          "ticket"_a, "timeout_s"_a, Unlocked())
      .def("close", [](Owner& self) { self.engine.reset(); }, Unlocked());
}
