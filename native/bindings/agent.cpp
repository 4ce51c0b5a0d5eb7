// The running agent. Every call lets go of the GIL; std::invalid_argument becomes ValueError.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/casters.h"
#include "bindings/names.h"
#include "transfer/agent.h"
#include "transfer/region.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace baton::transfer;

namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

void set_pool(Agent& agent, const std::vector<std::uintptr_t>& layer_addresses, std::uint32_t blocks,
              std::uint64_t block_bytes, std::uint64_t block_stride_bytes, std::uint32_t block_tokens,
              const std::string& fingerprint, std::shared_ptr<Region> region, int device, const std::string& layout) {
  Pool pool{
      .block_bytes = block_bytes, .stride_bytes = block_stride_bytes, .region = std::move(region), .device = device};
  for (const std::uintptr_t address : layer_addresses) {
    if (address == 0) throw std::invalid_argument("a layer's address is null");
    pool.layers.push_back(reinterpret_cast<std::uint8_t*>(address));
  }
  Geometry geometry{.fingerprint = fingerprint,
                    .layers = static_cast<std::uint32_t>(layer_addresses.size()),
                    .blocks = blocks,
                    .block_bytes = block_bytes,
                    .block_tokens = block_tokens};
  if (!layout.empty()) {
    geometry.layout = baton::layout::parse(layout);
    geometry.layers = geometry.layout->layers;
  }
  agent.set_pool(std::move(geometry), std::move(pool));
}

}  // namespace

void bind_agent(nb::module_& m) {
  nb::class_<Region>(m, "Region")
      .def(nb::new_([](std::uint64_t bytes) { return Region::create(bytes); }), "size"_a, Unlocked())
      .def_prop_ro("address", [](const Region& region) { return reinterpret_cast<std::uintptr_t>(region.data()); })
      .def_prop_ro("bytes", &Region::bytes);
  nb::class_<Agent>(m, "Agent")
      .def(
          "__init__",
          [](Agent* self, const Options& options, const std::vector<std::string>& listen) {
            new (self) Agent(options, listen);
          },
          "options"_a, "listen"_a, Unlocked())
      .def_prop_ro("endpoint", &Agent::endpoint)
      .def("fileno", &Agent::fileno)
      .def("poll", &Agent::poll, Unlocked())
      .def("set_pool", &set_pool, "layer_addresses"_a, "blocks"_a, "block_bytes"_a, "block_stride_bytes"_a,
           "block_tokens"_a, "fingerprint"_a, "region"_a.none() = nullptr, "device"_a = -1, "layout"_a = "", Unlocked())
      .def("open_lease", &Agent::open_lease, "key"_a, "unclaimed_ttl_s"_a, Unlocked())
      .def(
          "extend_lease",
          [](Agent& agent, const Key& key, std::uint64_t generation, std::vector<std::uint32_t> blocks) {
            agent.command(ExtendLease{key, generation, std::move(blocks)});
          },
          "key"_a, "generation"_a, "blocks"_a, Unlocked())
      .def(
          "post_ready",
          [](Agent& agent, const Key& key, std::uint64_t generation, std::int32_t layer, std::uint32_t tokens) {
            agent.command(PostReady{key, generation, layer, tokens});
          },
          "key"_a, "generation"_a, "layer"_a, "tokens"_a, Unlocked())
      .def(
          "post_ready_after",
          [](Agent& agent, const Key& key, std::uint64_t generation, std::int32_t layer, std::uint32_t tokens,
             std::uintptr_t stream) { agent.post_ready_after({key, generation, layer, tokens}, stream); },
          "key"_a, "generation"_a, "layer"_a, "tokens"_a, "stream"_a, Unlocked())
      .def(
          "complete_lease",
          [](Agent& agent, const Key& key, std::uint64_t generation, std::uint32_t tokens) {
            agent.command(CompleteLease{key, generation, tokens});
          },
          "key"_a, "generation"_a, "tokens"_a, Unlocked())
      .def(
          "revoke_lease", [](Agent& agent, const Key& key, bool final_) { agent.command(RevokeLease{key, final_}); },
          "key"_a, "final"_a, Unlocked())
      .def(
          "pull",
          [](Agent& agent, const Key& key, std::string endpoint, std::uint32_t first_token, std::uint32_t tokens,
             std::vector<std::uint32_t> blocks, double budget_s) {
            agent.command(StartPull{key, std::move(endpoint), first_token, tokens, std::move(blocks), budget_s});
          },
          "key"_a, "endpoint"_a, "first_token"_a, "tokens"_a, "blocks"_a, "budget_s"_a, Unlocked())
      .def(
          "cancel_pull", [](Agent& agent, const Key& key) { agent.command(CancelPull{key}); }, "key"_a, Unlocked())
      .def(
          "release",
          [](Agent& agent, const Key& key, std::string endpoint) {
            agent.command(ReleaseLease{key, std::move(endpoint)});
          },
          "key"_a, "endpoint"_a, Unlocked())
      .def(
          "set_faults", [](Agent& agent, const Faults& faults) { agent.command(SetFaults{faults}); }, "faults"_a,
          Unlocked())
      .def("stats", &Agent::stats, Unlocked())
      .def("close", &Agent::close, Unlocked());
}
