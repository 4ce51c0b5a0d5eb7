// The module baton_native.placement. Tables are NumPy's arrays, read and filled in place.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "placement/ranking.h"
#include "placement/terms.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace baton::placement;

namespace {

using Table = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Writable = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Workers = std::vector<std::uint32_t>;

// In the order of `Figure`.
constexpr const char* kFigureNames[] = {
    "computes_until_s", "half_interval_s", "interval_s",         "kv_share",
    "next_interval_s",  "slots_lacking",   "tokens_free",        "used_share",
    "block_tokens",     "compute_weight",  "context_tokens_max", "kv_bytes_per_token",
    "kv_tokens_max",    "pair_s",          "pool_tokens_free",   "promoted_token_s",
    "filed_token_s",    "ready",           "shared_share",       "step_s",
    "step_tokens_max",  "token_s",         "bandwidth"};
static_assert(std::size(kFigureNames) == kFigures);

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

Given given(const Table& table) {
  return {table.data(), table.shape(0), table.shape(1)};
}

Given figures_of(const Table& table, const Table& leg) {
  require(table.shape(0) == kFigures, "a table of figures has a row for each");
  require(table.shape(1) == leg.shape(1), "figures and leg are of different workers");
  return given(table);
}

Given blocks_of(const Table& table, std::size_t workers) {
  require(table.shape(0) >= 1 && table.shape(0) <= 3, "blocks are on the device, in the pool and in its file");
  require(table.shape(1) == workers, "blocks and figures are of different workers");
  return given(table);
}

void require_within(const Workers& workers, const Table& leg) {
  for (const std::uint32_t worker : workers) require(worker < leg.shape(1), "no such worker in the leg");
}

void require_leg(const Table& leg, std::size_t rows_min) {
  require(leg.shape(0) >= rows_min, "a leg has more rows");
}

Filled filled(const Writable& leg, const Table& figures, std::initializer_list<std::size_t> rows) {
  require(figures.shape(0) == kFigures, "a table of figures has a row for each");
  require(figures.shape(1) == leg.shape(1), "figures and leg are of different workers");
  require(std::find(rows.begin(), rows.end(), leg.shape(0)) != rows.end(), "a leg has other rows");
  return {leg.data(), leg.shape(0), leg.shape(1)};
}

std::span<const double> span_of(const Vector& vector) {
  return {vector.data(), vector.shape(0)};
}

nb::tuple to_python(const Shortlist& list) {
  return nb::make_tuple(list.workers, list.is_crowded);
}

nb::tuple to_python(const Option& option) {
  return nb::make_tuple(option.used_share, option.pool, option.computes, option.pulls ? int{*option.pulls} : -1);
}

nb::list to_python(const std::vector<Option>& options) {
  nb::list list;
  for (const Option& option : options) list.append(to_python(option));
  return list;
}

// The names of terms, and their values for these workers as float32, a term's in a row.
nb::tuple to_python(const std::vector<Term>& terms, const Workers& workers) {
  nb::list names;
  std::vector<float> values;
  values.reserve(terms.size() * workers.size());
  for (const Term& term : terms) {
    names.append(term.name);
    for (const std::uint32_t worker : workers) values.push_back(static_cast<float>(term.value(worker)));
  }
  return nb::make_tuple(nb::tuple(names), nb::bytes(values.data(), values.size() * sizeof(float)));
}

nb::object to_python(const std::optional<Option>& option) {
  return option ? nb::object(to_python(*option)) : nb::none();
}

}  // namespace

NB_MODULE(placement, m) {
  m.doc() = "Predicted times and costs of placements, and their ranking.";
  nb::list names;
  for (const char* name : kFigureNames) names.append(name);
  m.attr("FIGURES") = nb::tuple(names);
  m.def(
      "count_blocks",
      [](const nb::list& tiers, const nb::dict& rows, const Writable& blocks) {
        require(blocks.shape(0) == tiers.size(), "a table of blocks has a row for each tier");
        for (std::size_t tier = 0; tier < tiers.size(); ++tier) {
          const std::span<double> row(blocks.data() + tier * blocks.shape(1), blocks.shape(1));
          std::fill(row.begin(), row.end(), 0.0);
          if (!nb::isinstance<nb::dict>(tiers[tier])) throw nb::type_error("a tier is a dict");
          for (auto [worker, count] : nb::borrow<nb::dict>(tiers[tier])) {
            PyObject* place = PyDict_GetItemWithError(rows.ptr(), worker.ptr());
            if (place == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
            if (place == nullptr) continue;
            std::size_t index = 0;
            double number = 0;
            const bool are_numbers = nb::try_cast(nb::handle(place), index) && nb::try_cast(count, number);
            if (!are_numbers) throw nb::type_error("blocks and rows are numbers");
            require(index < row.size(), "no such row");
            row[index] = number;
          }
        }
      },
      "tiers"_a, "rows"_a, "blocks"_a.noconvert());
  m.def(
      "compute",
      [](const Writable& leg, const Table& figures, const Table& blocks, double prompt_tokens, double need_tokens,
         double now_s, bool decodes, double wait_s, double pressure_s, double memory_s, double displaced, double ask_s,
         const std::vector<double>& lent_tokens, const Vector& bandwidth, const Vector& bound_ratio) {
        const Filled out = filled(leg, figures, {kComputingPlain, kComputingTiered, kComputingColumns});
        const std::size_t links = lent_tokens.size() * out.workers;
        require(bandwidth.shape(0) == links && bound_ratio.shape(0) == links, "a lender has a link to each worker");
        compute(given(figures), blocks_of(blocks, out.workers), {prompt_tokens, need_tokens, now_s, decodes},
                {wait_s, pressure_s, memory_s, displaced},
                {lent_tokens, span_of(bandwidth), span_of(bound_ratio), ask_s}, out);
      },
      "leg"_a.noconvert(), "figures"_a.noconvert(), "blocks"_a.noconvert(), "prompt_tokens"_a, "need_tokens"_a,
      "now_s"_a, "decodes"_a, "wait_s"_a, "pressure_s"_a, "memory_s"_a, "displaced"_a, "ask_s"_a, "lent_tokens"_a,
      "bandwidth"_a.noconvert(), "bound_ratio"_a.noconvert());
  m.def(
      "receive",
      [](const Writable& leg, const Table& figures, const Table& blocks, double prompt_tokens, double need_tokens,
         double wait_s, double pressure_s, double memory_s) {
        const Filled out = filled(leg, figures, {kReceivingPlain, kReceivingColumns});
        receive(given(figures), blocks_of(blocks, out.workers), {prompt_tokens, need_tokens, 0.0, true},
                {wait_s, pressure_s, memory_s}, out);
      },
      "leg"_a.noconvert(), "figures"_a.noconvert(), "blocks"_a.noconvert(), "prompt_tokens"_a, "need_tokens"_a,
      "wait_s"_a, "pressure_s"_a, "memory_s"_a);
  m.def(
      "shortlist",
      [](const Table& leg, std::size_t count, double tie_share, double tie_s) {
        require_leg(leg, kColumns);
        return to_python(shortlist(given(leg), count, {tie_share, tie_s}));
      },
      "leg"_a.noconvert(), "count"_a, "tie_share"_a, "tie_s"_a);
  m.def(
      "shortlist_pulls",
      [](const Table& leg, double own_s, std::size_t count, double tie_share, double tie_s) {
        require_leg(leg, kReceivingPlain);
        return to_python(shortlist_pulls(given(leg), own_s, count, {tie_share, tie_s}));
      },
      "leg"_a.noconvert(), "own_s"_a, "count"_a, "tie_share"_a, "tie_s"_a);
  m.def(
      "computing_terms",
      [](const Table& leg, bool promotes, bool lends, const Workers& workers) {
        require_leg(leg, lends ? kComputingColumns : promotes ? kComputingTiered : kComputingPlain);
        require_within(workers, leg);
        return to_python(computing_terms(given(leg), promotes, lends), workers);
      },
      "leg"_a.noconvert(), "promotes"_a, "lends"_a, "workers"_a);
  m.def(
      "receiving_terms",
      [](const Table& leg, bool promotes, const Workers& workers) {
        require_leg(leg, promotes ? kReceivingColumns : kReceivingPlain);
        require_within(workers, leg);
        return to_python(receiving_terms(given(leg), promotes), workers);
      },
      "leg"_a.noconvert(), "promotes"_a, "workers"_a);
  nb::class_<Options>(m, "Options")
      .def(nb::init<>())
      .def("__bool__", [](const Options& self) { return !self.empty(); })
      .def(
          "add_wholes",
          [](Options& self, const Table& leg, const Table& figures, const Workers& workers) {
            require_leg(leg, kColumns);
            require_within(workers, leg);
            self.add_wholes(given(leg), figures_of(figures, leg), workers);
          },
          "leg"_a.noconvert(), "figures"_a.noconvert(), "workers"_a)
      .def(
          "add_pairs",
          [](Options& self, const Table& source, const Table& sink, const Table& sink_figures, const Workers& sources,
             const Workers& sinks, const std::vector<double>& bandwidth, double overlap) {
            require_leg(source, kComputingPlain);
            require_leg(sink, kReceivingPlain);
            require_within(sources, source);
            require_within(sinks, sink);
            require(bandwidth.size() == sources.size() * sinks.size(), "each pair has a bandwidth");
            self.add_pairs(given(source), given(sink), figures_of(sink_figures, sink), sources, sinks, bandwidth,
                           overlap);
          },
          "source"_a.noconvert(), "sink"_a.noconvert(), "sink_figures"_a.noconvert(), "sources"_a, "sinks"_a,
          "bandwidth"_a, "overlap"_a)
      .def(
          "rank",
          [](const Options& self, double tie_share, double tie_s, std::size_t count) {
            require(!self.empty(), "there is no option");
            const Ranking ranking = self.rank({tie_share, tie_s}, count);
            return nb::make_tuple(to_python(ranking.ties), to_python(ranking.best), to_python(ranking.whole),
                                  to_python(ranking.pair));
          },
          "tie_share"_a, "tie_s"_a, "count"_a);
}
