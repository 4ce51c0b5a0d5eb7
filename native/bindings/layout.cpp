// The module baton_native.layout. Names of kinds cross as strings; every copy lets go of the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "layout/pieces.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace baton::layout;

namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

constexpr const char* kPlanes[] = {"k", "v", "latent"};

// A table that owns its blocks.
struct Blocks {
  std::vector<std::uint32_t> blocks;
  std::uint32_t origin = 0;

  operator Table() const { return {blocks, origin}; }
};

// The bytes of any object with a buffer, held while a copy runs without the GIL.
class Bytes {
 public:
  Bytes(nb::handle object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  [[nodiscard]] std::span<std::uint8_t> span() const {
    return {static_cast<std::uint8_t*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

// Numbers come as Python's, so that one that is negative or too large is refused like every other that makes no sense.
Layout make_layout(const nb::int_& layers, const nb::int_& kv_heads, const nb::int_& dim, const std::string& dtype,
                   const std::string& order, const std::string& form, const nb::int_& block_tokens,
                   const std::string& packing, const nb::int_& tp_rank, const nb::int_& tp_size) {
  const auto text = [](const nb::int_& number) { return std::string(nb::str(number).c_str()); };
  return parse("layers=" + text(layers) + " kv_heads=" + text(kv_heads) + " dim=" + text(dim) + " dtype=" + dtype +
               " order=" + order + " form=" + form + " packing=" + packing + " block_tokens=" + text(block_tokens) +
               " tp=" + text(tp_rank) + "/" + text(tp_size));
}

// A kind's name is the word after its key in the text form.
std::string word_of(const Layout& layout, const char* key) {
  const std::string text = to_string(layout);
  const std::size_t begin = text.find(key) + std::string_view(key).size();
  return text.substr(begin, text.find(' ', begin) - begin);
}

Pool make_pool(const Layout& layout, const std::vector<std::uintptr_t>& addresses, std::uint32_t blocks,
               std::uint64_t stride_bytes) {
  std::vector<std::uint8_t*> tensors;
  tensors.reserve(addresses.size());
  for (const std::uintptr_t address : addresses) tensors.push_back(reinterpret_cast<std::uint8_t*>(address));
  return {layout, std::move(tensors), blocks, stride_bytes};
}

// A GPU that carries out what the host otherwise does. Addresses of pools are its own then.
class DeviceMover {
 public:
  DeviceMover(const std::string& library, int device, double budget_s)
      : device_(library, device), queue_(device_), budget_s_(budget_s) {}

  // Each returns the seconds that it took the device.
  double convert(const Pool& source, const Blocks& source_table, const Pool& sink, const Blocks& sink_table,
                 std::uint32_t first_token, std::uint32_t tokens, std::uint32_t first_layer, std::uint32_t layers) {
    return carry_out([&](const Carry& carry) {
      baton::layout::convert(source, source_table, sink, sink_table, {first_token, tokens}, first_layer, layers, carry);
    });
  }
  double gather(const Pool& pool, const Blocks& table, const Chunk& chunk, std::uintptr_t address) {
    return carry_out(
        [&](const Carry& carry) { baton::layout::gather(pool, table, chunk, wire(pool, chunk, address), carry); });
  }
  double scatter(const Pool& pool, const Blocks& table, const Chunk& chunk, std::uintptr_t address) {
    return carry_out(
        [&](const Carry& carry) { baton::layout::scatter(pool, table, chunk, wire(pool, chunk, address), carry); });
  }

 private:
  static std::span<std::uint8_t> wire(const Pool& pool, const Chunk& chunk, std::uintptr_t address) {
    return {reinterpret_cast<std::uint8_t*>(address), chunk_bytes(pool.layout(), chunk)};
  }
  template <class Plan>
  double carry_out(const Plan& plan) {
    PieceList list;
    plan(std::ref(list));
    return static_cast<double>(move_all(queue_, list.pieces(), budget_s_)) * 1e-9;
  }

  baton::gpu::Device device_;
  baton::gpu::Queue queue_;
  double budget_s_;
};

Plane plane_of(const std::string& name) {
  for (std::size_t i = 0; i < std::size(kPlanes); ++i) {
    if (name == kPlanes[i]) return static_cast<Plane>(i);
  }
  throw Invalid("'" + name + "' is no plane; there are k, v and latent");
}

void bind_values(nb::module_& m) {
  nb::class_<Layout>(m, "Layout")
      .def(
          "__init__",
          [](Layout* self, const nb::int_& layers, const nb::int_& kv_heads, const nb::int_& dim,
             const std::string& dtype, const std::string& order, const std::string& form, const nb::int_& block_tokens,
             const std::string& packing, const nb::int_& tp_rank, const nb::int_& tp_size) {
            new (self)
                Layout(make_layout(layers, kv_heads, dim, dtype, order, form, block_tokens, packing, tp_rank, tp_size));
          },
          nb::kw_only(), "layers"_a, "kv_heads"_a, "dim"_a, "dtype"_a, "order"_a, "form"_a, "block_tokens"_a,
          "packing"_a = "plain", "tp_rank"_a = 0, "tp_size"_a = 1)
      .def_static(
          "parse", [](const std::string& text) { return parse(text); }, "text"_a)
      .def_ro("layers", &Layout::layers)
      .def_ro("kv_heads", &Layout::kv_heads)
      .def_ro("dim", &Layout::dim)
      .def_prop_ro("dtype", [](const Layout& layout) { return word_of(layout, "dtype="); })
      .def_prop_ro("order", [](const Layout& layout) { return word_of(layout, "order="); })
      .def_prop_ro("form", [](const Layout& layout) { return word_of(layout, "form="); })
      .def_prop_ro("packing", [](const Layout& layout) { return word_of(layout, "packing="); })
      .def_ro("block_tokens", &Layout::block_tokens)
      .def_ro("tp_rank", &Layout::tp_rank)
      .def_ro("tp_size", &Layout::tp_size)
      .def_prop_ro("heads",
                   [](const Layout& layout) { return std::pair(heads_of(layout).first, heads_of(layout).count); })
      .def_prop_ro("tensors", &tensors_of)
      .def_prop_ro("block_bytes", &block_bytes)
      .def(nb::self == nb::self)
      .def("__hash__", [](const Layout& layout) { return std::hash<std::string>{}(to_string(layout)); })
      .def("__str__", &to_string)
      .def("__repr__", [](const Layout& layout) { return "Layout.parse('" + to_string(layout) + "')"; });
  nb::class_<Blocks>(m, "Table")
      .def(nb::init<std::vector<std::uint32_t>, std::uint32_t>(), "blocks"_a, "origin"_a = 0)
      .def_ro("blocks", &Blocks::blocks)
      .def_ro("origin", &Blocks::origin);
  nb::class_<Move>(m, "Move")
      .def_ro("source_block", &Move::source_block)
      .def_ro("source_token", &Move::source_token)
      .def_ro("sink_block", &Move::sink_block)
      .def_ro("sink_token", &Move::sink_token)
      .def_ro("tokens", &Move::tokens)
      .def_ro("whole", &Move::whole);
  nb::class_<Share>(m, "Share").def_ro("source_rank", &Share::source_rank).def_prop_ro("heads", [](const Share& share) {
    return std::pair(share.heads.first, share.heads.count);
  });
  nb::class_<Chunk>(m, "Chunk")
      .def(
          "__init__",
          [](Chunk* self, std::uint32_t layer, const std::string& plane, std::uint32_t first_token,
             std::uint32_t tokens, std::pair<std::uint32_t, std::uint32_t> heads) {
            new (self) Chunk{layer, plane_of(plane), {first_token, tokens}, {heads.first, heads.second}};
          },
          nb::kw_only(), "layer"_a, "plane"_a, "first_token"_a, "tokens"_a, "heads"_a)
      .def_ro("layer", &Chunk::layer)
      .def_prop_ro("plane", [](const Chunk& chunk) { return kPlanes[static_cast<std::size_t>(chunk.plane)]; })
      .def_prop_ro("first_token", [](const Chunk& chunk) { return chunk.tokens.first; })
      .def_prop_ro("tokens", [](const Chunk& chunk) { return chunk.tokens.count; })
      .def_prop_ro("heads", [](const Chunk& chunk) { return std::pair(chunk.heads.first, chunk.heads.count); });
  nb::class_<Pool>(m, "Pool")
      .def(
          "__init__",
          [](Pool* self, const Layout& layout, const std::vector<std::uintptr_t>& addresses, std::uint32_t blocks,
             std::uint64_t stride_bytes) { new (self) Pool(make_pool(layout, addresses, blocks, stride_bytes)); },
          "layout"_a, "addresses"_a, "blocks"_a, "stride_bytes"_a)
      .def_prop_ro("layout", &Pool::layout)
      .def_prop_ro("blocks", &Pool::blocks);
}

}  // namespace

NB_MODULE(layout, m) {
  m.doc() = "KV layouts: what cannot be converted into what, who is asked for which heads, and the conversions.";
  nb::exception<Invalid>(m, "Invalid", PyExc_ValueError);
  nb::exception<Mismatch>(m, "Mismatch", PyExc_ValueError);
  bind_values(m);
  m.def("identical", &identical, "source"_a, "sink"_a);
  m.def("shares", &shares, "source"_a, "sink"_a);
  m.def(
      "common_heads",
      [](const Layout& source, const Layout& sink) {
        const Heads heads = common_heads(source, sink);
        return std::pair(heads.first, heads.count);
      },
      "source"_a, "sink"_a);
  m.def(
      "plan",
      [](const Layout& source, const Blocks& source_table, const Layout& sink, const Blocks& sink_table,
         std::uint32_t first_token, std::uint32_t tokens) {
        check_convertible(source, sink);
        return plan(block_of(source), source_table, block_of(sink), sink_table, {first_token, tokens});
      },
      "source"_a, "source_table"_a, "sink"_a, "sink_table"_a, "first_token"_a, "tokens"_a, Unlocked());
  m.def(
      "chunks",
      [](const Layout& layout, std::uint32_t layer, std::uint32_t first_token, std::uint32_t tokens,
         std::pair<std::uint32_t, std::uint32_t> heads, std::uint64_t bytes_max) {
        return chunks(layout, layer, {heads.first, heads.second}, {first_token, tokens}, bytes_max);
      },
      "layout"_a, "layer"_a, "first_token"_a, "tokens"_a, "heads"_a, "bytes_max"_a, Unlocked());
  m.def("chunk_bytes", &chunk_bytes, "layout"_a, "chunk"_a);
  m.def(
      "convert",
      [](const Pool& source, const Blocks& source_table, const Pool& sink, const Blocks& sink_table,
         std::uint32_t first_token, std::uint32_t tokens, std::uint32_t first_layer, std::uint32_t layers) {
        return convert(source, source_table, sink, sink_table, {first_token, tokens}, first_layer, layers);
      },
      "source"_a, "source_table"_a, "sink"_a, "sink_table"_a, "first_token"_a, "tokens"_a, "first_layer"_a, "layers"_a,
      Unlocked());
  m.def(
      "convert_tensor",
      [](const Pool& source, const Blocks& source_table, const Pool& sink, const Blocks& sink_table,
         std::uint32_t first_token, std::uint32_t tokens, std::uint32_t tensor) {
        return convert_tensor(source, source_table, sink, sink_table, {first_token, tokens}, tensor);
      },
      "source"_a, "source_table"_a, "sink"_a, "sink_table"_a, "first_token"_a, "tokens"_a, "tensor"_a, Unlocked());
  m.def(
      "gather",
      [](const Pool& pool, const Blocks& table, const Chunk& chunk, nb::handle out) {
        const Bytes bytes(out, PyBUF_WRITABLE);
        nb::gil_scoped_release release;
        gather(pool, table, chunk, bytes.span());
      },
      "pool"_a, "table"_a, "chunk"_a, "out"_a);
  m.def(
      "scatter",
      [](const Pool& pool, const Blocks& table, const Chunk& chunk, nb::handle data) {
        const Bytes bytes(data, PyBUF_SIMPLE);
        nb::gil_scoped_release release;
        scatter(pool, table, chunk, bytes.span());
      },
      "pool"_a, "table"_a, "chunk"_a, "data"_a);
  nb::class_<DeviceMover>(m, "DeviceMover")
      .def(nb::init<const std::string&, int, double>(), "library"_a = "", "device"_a = 0, "budget_s"_a = 10.0,
           Unlocked())
      .def("convert", &DeviceMover::convert, "source"_a, "source_table"_a, "sink"_a, "sink_table"_a, "first_token"_a,
           "tokens"_a, "first_layer"_a, "layers"_a, Unlocked())
      .def("gather", &DeviceMover::gather, "pool"_a, "table"_a, "chunk"_a, "address"_a, Unlocked())
      .def("scatter", &DeviceMover::scatter, "pool"_a, "table"_a, "chunk"_a, "address"_a, Unlocked());
}
