// The core itself, to be stepped by an agent in memory or a test: its options, events, actions, reports.
#include "transfer/core.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "bindings/casters.h"
#include "bindings/names.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace baton::transfer;

namespace {

void bind_values(nb::module_& m) {
  nb::class_<Faults>(m, "Faults")
      .def(
          "__init__",
          [](Faults* self, double delay_s, std::uint32_t corrupt_every, const std::string& corruption,
             bool before_checksum, bool silent) {
            new (self) Faults{delay_s, corrupt_every, corruption_of(corruption), before_checksum, silent};
          },
          "delay_s"_a = 0.0, "corrupt_every"_a = 0, "corruption"_a = "flip", "before_checksum"_a = false,
          "silent"_a = false);
  nb::class_<Options>(m, "Options")
      .def(nb::init<>())
      .def_rw("secret", &Options::secret)
      .def_rw("host", &Options::host)
      .def_rw("backends", &Options::backends)
      .def_rw("striped", &Options::striped)
      .def_rw("streams", &Options::streams)
      .def_rw("lane_bytes", &Options::lane_bytes)
      .def_rw("checksum", &Options::checksum)
      .def_rw("tells_asks", &Options::tells_asks)
      .def_prop_rw(
          "verbs_library", [](const Options& o) { return o.fabric.verbs_library; },
          [](Options& o, std::string value) { o.fabric.verbs_library = std::move(value); })
      .def_prop_rw(
          "verbs_devices", [](const Options& o) { return o.fabric.verbs_devices; },
          [](Options& o, std::string value) { o.fabric.verbs_devices = std::move(value); })
      .def_prop_rw(
          "ucx_library", [](const Options& o) { return o.fabric.ucx_library; },
          [](Options& o, std::string value) { o.fabric.ucx_library = std::move(value); })
      .def_prop_rw(
          "gpu_library", [](const Options& o) { return o.fabric.gpu_library; },
          [](Options& o, std::string value) { o.fabric.gpu_library = std::move(value); })
      .def_rw("lease_ttl_s", &Options::lease_ttl_s)
      .def_rw("unclaimed_ttl_s", &Options::unclaimed_ttl_s)
      .def_rw("wanted_timeout_s", &Options::wanted_timeout_s)
      .def_rw("connect_timeout_s", &Options::connect_timeout_s)
      .def_rw("stall_timeout_s", &Options::stall_timeout_s)
      .def_rw("incarnation", &Options::incarnation)
      .def_rw("entropy", &Options::entropy)
      .def_rw("faults", &Options::faults)
      .def_prop_rw(
          "chunks_served", [](const Options& o) { return o.limits.chunks_served; },
          [](Options& o, std::uint32_t value) { o.limits.chunks_served = value; })
      .def_prop_rw(
          "chunk_bytes", [](const Options& o) { return o.limits.chunk_bytes; },
          [](Options& o, std::uint32_t value) { o.limits.chunk_bytes = value; });
  nb::class_<RailShare>(m, "RailShare")
      .def_ro("rail", &RailShare::rail)
      .def_ro("bytes", &RailShare::bytes)
      .def_ro("chunks", &RailShare::chunks)
      .def_ro("retired", &RailShare::retired)
      .def_ro("bytes_per_s", &RailShare::bytes_per_s);
  nb::class_<Report>(m, "Report")
      .def_prop_ro("kind", [](const Report& r) { return name_of(r.kind); })
      .def_ro("key", &Report::key)
      .def_prop_ro("cause", [](const Report& r) { return name_of(r.cause); })
      .def_ro("detail", &Report::detail)
      .def_ro("layers", &Report::layers)
      .def_ro("bytes", &Report::bytes)
      .def_ro("tokens", &Report::tokens)
      .def_ro("waiting_s", &Report::waiting_s)
      .def_ro("moving_s", &Report::moving_s)
      .def_ro("backend", &Report::backend)
      .def_ro("declined", &Report::declined)
      .def_ro("restarts", &Report::restarts)
      .def_ro("rails", &Report::rails);
  nb::class_<Stats>(m, "Stats")
      .def_ro("leases", &Stats::leases)
      .def_ro("leased_blocks", &Stats::leased_blocks)
      .def_ro("pulls", &Stats::pulls)
      .def_ro("parked", &Stats::parked)
      .def_ro("connections", &Stats::connections)
      .def_ro("pulled_bytes", &Stats::pulled_bytes)
      .def_ro("pulled_blocks", &Stats::pulled_blocks)
      .def_ro("served_bytes", &Stats::served_bytes)
      .def_ro("pulls_done", &Stats::pulls_done)
      .def_ro("pulls_failed", &Stats::pulls_failed)
      .def_ro("leases_expired", &Stats::leases_expired)
      .def_ro("leases_revoked", &Stats::leases_revoked)
      .def_ro("checksum_failures", &Stats::checksum_failures)
      .def_ro("protocol_errors", &Stats::protocol_errors)
      .def_ro("fallbacks", &Stats::fallbacks)
      .def_ro("lanes_retired", &Stats::lanes_retired)
      .def_ro("rails", &Stats::rails);
}

void bind_commands(nb::module_& m) {
  nb::class_<OpenLease>(m, "OpenLease").def(nb::init<Key, double>(), "key"_a, "unclaimed_ttl_s"_a = -1.0);
  nb::class_<ExtendLease>(m, "ExtendLease")
      .def(nb::init<Key, std::uint64_t, std::vector<std::uint32_t>>(), "key"_a, "generation"_a, "blocks"_a);
  nb::class_<PostReady>(m, "PostReady")
      .def(nb::init<Key, std::uint64_t, std::int32_t, std::uint32_t>(), "key"_a, "generation"_a, "layer"_a, "tokens"_a);
  nb::class_<CompleteLease>(m, "CompleteLease")
      .def(nb::init<Key, std::uint64_t, std::uint32_t>(), "key"_a, "generation"_a, "tokens"_a);
  nb::class_<RevokeLease>(m, "RevokeLease").def(nb::init<Key, bool>(), "key"_a, "final"_a);
  nb::class_<StartPull>(m, "StartPull")
      .def(nb::init<Key, std::string, std::uint32_t, std::uint32_t, std::vector<std::uint32_t>, double>(), "key"_a,
           "endpoint"_a, "first_token"_a, "tokens"_a, "blocks"_a, "budget_s"_a);
  nb::class_<CancelPull>(m, "CancelPull").def(nb::init<Key>(), "key"_a);
  nb::class_<ReleaseLease>(m, "ReleaseLease").def(nb::init<Key, std::string>(), "key"_a, "endpoint"_a);
  nb::class_<SetFaults>(m, "SetFaults").def(nb::init<Faults>(), "faults"_a);
  nb::class_<Shutdown>(m, "Shutdown").def(nb::init<>());
}

void bind_happenings(nb::module_& m) {
  nb::class_<Accepted>(m, "Accepted").def(nb::init<ConnectionId>(), "connection"_a);
  nb::class_<Connected>(m, "Connected").def(nb::init<ConnectionId>(), "connection"_a);
  nb::class_<Closed>(m, "Closed")
      .def(nb::init<ConnectionId, std::string, bool>(), "connection"_a, "detail"_a, "refused"_a = false);
  nb::class_<FrameArrived>(m, "FrameArrived").def(nb::init<ConnectionId, Blob>(), "connection"_a, "frame"_a);
  nb::class_<DataArrived>(m, "DataArrived")
      .def(nb::init<ConnectionId, PullId, std::uint32_t, std::uint64_t>(), "connection"_a, "pull"_a, "sequence"_a,
           "payload_bytes"_a);
  nb::class_<Served>(m, "Served")
      .def(nb::init<ConnectionId, PullId, std::uint32_t, std::int32_t, std::uint32_t>(), "connection"_a, "pull"_a,
           "sequence"_a, "slot"_a, "crc"_a);
  nb::class_<Granted>(m, "Granted")
      .def(nb::init<ConnectionId, PullId, std::uint32_t, std::uint32_t, Blob>(), "connection"_a, "pull"_a, "sequence"_a,
           "crc"_a, "where"_a);
  nb::class_<Placed>(m, "Placed")
      .def(nb::init<ConnectionId, PullId, std::uint32_t, std::int32_t, std::uint32_t>(), "connection"_a, "pull"_a,
           "sequence"_a, "slot"_a, "crc"_a);
  nb::class_<Converted>(m, "Converted")
      .def(nb::init<ConnectionId, PullId, std::uint32_t>(), "connection"_a, "pull"_a, "sequence"_a);
  nb::class_<PlacingStopped>(m, "PlacingStopped").def(nb::init<PullId>(), "pull"_a);
  nb::class_<BackendOffered>(m, "BackendOffered")
      .def(nb::init<ConnectionId, bool, Blob, std::string>(), "connection"_a, "ok"_a, "offer"_a, "why"_a = "");
  nb::class_<BackendAccepted>(m, "BackendAccepted")
      .def(nb::init<ConnectionId, bool, Blob, std::string>(), "connection"_a, "ok"_a, "proof"_a, "why"_a = "");
  nb::class_<BackendChecked>(m, "BackendChecked").def(nb::init<ConnectionId, bool>(), "connection"_a, "ok"_a);
}

void bind_actions(nb::module_& m) {
  nb::class_<Connect>(m, "Connect")
      .def_ro("connection", &Connect::connection)
      .def_ro("address", &Connect::address)
      .def_ro("label", &Connect::label);
  nb::class_<Close>(m, "Close").def_ro("connection", &Close::connection).def_ro("detail", &Close::detail);
  nb::class_<Send>(m, "Send").def_ro("connection", &Send::connection).def_ro("frame", &Send::frame);
  nb::class_<Serve>(m, "Serve")
      .def_ro("connection", &Serve::connection)
      .def_ro("pull", &Serve::pull)
      .def_ro("sequence", &Serve::sequence)
      .def_ro("layer", &Serve::layer)
      .def_ro("blocks", &Serve::blocks)
      .def_prop_ro("corrupt", [](const Serve& s) { return s.corruption != Corruption::none; })
      .def_ro("before_checksum", &Serve::before_checksum)
      .def(
          "corrupted",
          [](const Serve& s, Blob data) {
            corrupt(data, s.corruption);
            return data;
          },
          "data"_a);
  nb::class_<StopServing>(m, "StopServing")
      .def_ro("connection", &StopServing::connection)
      .def_ro("pull", &StopServing::pull);
  nb::class_<Credit>(m, "Credit").def_ro("connection", &Credit::connection).def_ro("slot", &Credit::slot);
  nb::class_<Place>(m, "Place")
      .def_ro("connection", &Place::connection)
      .def_ro("pull", &Place::pull)
      .def_ro("sequence", &Place::sequence)
      .def_ro("slot", &Place::slot)
      .def_ro("layer", &Place::layer)
      .def_ro("blocks", &Place::blocks)
      .def_ro("where", &Place::where);
  nb::class_<Stage>(m, "Stage").def_ro("connection", &Stage::connection).def_prop_ro("layout", [](const Stage& s) {
    return to_string(s.source.layout.value());
  });
  nb::class_<Convert>(m, "Convert")
      .def_ro("connection", &Convert::connection)
      .def_ro("pull", &Convert::pull)
      .def_ro("sequence", &Convert::sequence)
      .def_ro("layer", &Convert::layer)
      .def_ro("staged", &Convert::staged)
      .def_ro("staged_origin", &Convert::staged_origin)
      .def_ro("blocks", &Convert::blocks)
      .def_ro("origin", &Convert::origin)
      .def_ro("first_token", &Convert::first_token)
      .def_ro("tokens", &Convert::tokens);
  nb::class_<Discard>(m, "Discard").def_ro("connection", &Discard::connection);
  nb::class_<StopPlacing>(m, "StopPlacing").def_ro("pull", &StopPlacing::pull);
  nb::class_<OfferBackend>(m, "OfferBackend")
      .def_ro("connection", &OfferBackend::connection)
      .def_ro("backend", &OfferBackend::backend);
  nb::class_<AcceptBackend>(m, "AcceptBackend")
      .def_ro("connection", &AcceptBackend::connection)
      .def_ro("backend", &AcceptBackend::backend)
      .def_ro("offer", &AcceptBackend::offer);
  nb::class_<CheckBackend>(m, "CheckBackend")
      .def_ro("connection", &CheckBackend::connection)
      .def_ro("backend", &CheckBackend::backend)
      .def_ro("proof", &CheckBackend::proof);
  nb::class_<UseBackend>(m, "UseBackend")
      .def_ro("connection", &UseBackend::connection)
      .def_ro("backend", &UseBackend::backend)
      .def_ro("checksum", &UseBackend::checksum);
}

}  // namespace

void bind_core(nb::module_& m) {
  bind_values(m);
  bind_commands(m);
  bind_happenings(m);
  bind_actions(m);
  nb::class_<Core>(m, "Core")
      .def(nb::init<Options>(), "options"_a)
      .def(
          "set_geometry",
          [](Core& core, std::string fingerprint, std::uint32_t layers, std::uint32_t blocks, std::uint64_t block_bytes,
             std::uint32_t block_tokens, const std::string& layout) {
            Geometry geometry{std::move(fingerprint), layers, blocks, block_bytes, block_tokens};
            if (!layout.empty()) geometry.layout = baton::layout::parse(layout);
            core.set_geometry(std::move(geometry));
          },
          "fingerprint"_a, "layers"_a, "blocks"_a, "block_bytes"_a, "block_tokens"_a, "layout"_a = "")
      .def(
          "step", [](Core& core, double now_s, const std::vector<Event>& events) { return core.step(now_s, events); },
          "now_s"_a, "events"_a)
      .def_prop_ro("wake_s", &Core::wake_s)
      .def("generation", &Core::generation, "key"_a)
      .def("stats", &Core::stats);
}
