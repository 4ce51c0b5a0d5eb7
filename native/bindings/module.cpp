#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_hash(nb::module_& m);
void bind_core(nb::module_& m);
void bind_agent(nb::module_& m);
void bind_radix(nb::module_& m);
void bind_limits(nb::module_& m);
void bind_gpu(nb::module_& m);
void bind_copies(nb::module_& m);

NB_MODULE(_core, m) {
  m.doc() = "Baton's native core: block hashing, the KV transfer agent and the prefix index.";
  bind_hash(m);
  bind_core(m);
  bind_agent(m);
  bind_radix(m);
  bind_limits(m);
  bind_gpu(m);
  bind_copies(m);
}
