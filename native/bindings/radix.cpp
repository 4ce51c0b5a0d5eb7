// The radix tree under Python.
#include "radix/tree.h"

#include "bindings/named_index.h"

using namespace baton::bindings;

void bind_radix(nb::module_& m) {
  nb::exception<MalformedRun>(m, "MalformedRun", PyExc_ValueError);
  nb::exception<UnknownBlock>(m, "UnknownBlock", PyExc_LookupError);
  nb::exception<IndexFull>(m, "IndexFull", PyExc_MemoryError);
  bind_size(m, "RadixSize");
  bind_index<Tree>(m, "RadixTree")
      .def("dump_behind", &NamedIndex<Tree>::dump_behind, "block"_a)
      .def("add", &NamedIndex<Tree>::add, "branches"_a)
      .def("survey", &NamedIndex<Tree>::survey, "top"_a)
      .def("unheld", &NamedIndex<Tree>::unheld, "blocks"_a)
      .def("idle", &NamedIndex<Tree>::idle, "ticks"_a, "blocks_max"_a)
      .def("age_of", &NamedIndex<Tree>::age_of, "blocks"_a)
      .def("tick", &NamedIndex<Tree>::tick);
}
