// The baseline under Python, with the calls and the exceptions of `baton_native.RadixTree`.
#include "bindings/named_index.h"
#include "tests/baseline/flat.h"

using namespace baton::bindings;

namespace {

void raise_as_baton_native(const std::exception_ptr& error, void*) {
  const nb::object module = nb::module_::import_("baton_native");
  const auto set = [&](const char* name, const std::exception& what) {
    PyErr_SetString(nb::object(module.attr(name)).ptr(), what.what());
  };
  try {
    std::rethrow_exception(error);
  } catch (const MalformedRun& what) {
    set("MalformedRun", what);
  } catch (const UnknownBlock& what) {
    set("UnknownBlock", what);
  } catch (const IndexFull& what) {
    set("IndexFull", what);
  }
}

}  // namespace

NB_MODULE(flat_table, m) {
  nb::register_exception_translator(raise_as_baton_native);
  bind_size(m, "FlatSize");
  bind_index<baton::radix::Flat>(m, "FlatTable");
}
