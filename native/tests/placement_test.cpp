// A leg of each kind, and the ranking of what its workers make. Their values are tested in Python, against each worker
// alone (tests/unit/test_native_placement.py); here, under the sanitizers, that tables of every size hold.
#include "placement/ranking.h"
#include "placement/terms.h"

#include <algorithm>
#include <limits>
#include <random>

#include "tests/check.h"

namespace {

using namespace baton::placement;

// A table of numbers, each from 1 to below 3.
std::vector<double> numbers(std::mt19937_64& random, std::size_t rows, std::size_t workers) {
  std::vector<double> table(rows * workers);
  for (double& number : table) number = std::uniform_real_distribution(1.0, 3.0)(random);
  return table;
}

}  // namespace

TEST(legs_and_rankings_of_every_size_hold) {
  std::mt19937_64 random(1);
  for (std::size_t workers = 0; workers < 9; ++workers) {
    for (std::size_t tiers = 1; tiers <= 3; ++tiers) {
      for (std::size_t lenders = 0; lenders < 3; ++lenders) {
        const auto figures = numbers(random, kFigures, workers), blocks = numbers(random, tiers, workers);
        const auto lent = numbers(random, 1, lenders), links = numbers(random, lenders, workers);
        const Given given{figures.data(), kFigures, workers};
        const Demand demand{40.0, 50.0, 0.5, true};
        const Weights weights{10.0, 0.5, 10.0, 1.0};
        const std::size_t height = lenders ? kComputingColumns : tiers > 1 ? kComputingTiered : kComputingPlain;
        std::vector<double> computing(height * workers), receiving(kReceivingColumns * workers);
        compute(given, {blocks.data(), tiers, workers}, demand, weights, {lent, links, links, 0.005},
                {computing.data(), height, workers});
        receive(given, {blocks.data(), tiers, workers}, demand, weights,
                {receiving.data(), kReceivingColumns, workers});
        const Given source{computing.data(), height, workers}, sink{receiving.data(), kReceivingColumns, workers};
        const Ties ties{0.05, 0.001};
        const auto sources = shortlist(source, 3, ties).workers;
        const auto sinks = shortlist_pulls(sink, 0.1, 3, ties).workers;
        CHECK(sources.empty() == (workers == 0) && sinks.empty() == (workers == 0));
        Options options;
        options.add_wholes(source, given, sources);
        options.add_pairs(source, sink, given, sources, sinks, std::vector<double>(sources.size() * sinks.size(), 1e9),
                          1.0);
        CHECK(options.empty() == (workers == 0));
        for (const auto& terms :
             {computing_terms(source, tiers > 1 || lenders, lenders), receiving_terms(sink, true)}) {
          for (const Term& term : terms) {
            for (std::size_t worker = 0; worker < workers; ++worker) CHECK(term.value(worker) > -1e12);
          }
        }
        if (options.empty()) continue;
        const Ranking ranking = options.rank(ties, 4);
        CHECK(ranking.whole && !ranking.whole->pulls && ranking.pair && ranking.pair->pulls);
        CHECK(ranking.best.front().cost_s == std::min(ranking.whole->cost_s, ranking.pair->cost_s));
        for (const Option& tie : ranking.ties) CHECK(tie.cost_s <= ties.limit_s(ranking.best.front().cost_s));
      }
    }
  }
}

TEST(costs_that_are_no_numbers_end_nothing) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::vector<double> leg(kReceivingColumns * 40, 1.0), figures(kFigures * 40, 1.0);
  std::vector<std::uint32_t> workers;
  for (std::uint32_t worker = 0; worker < 40; ++worker) {
    leg[kCostS * 40 + worker] = worker % 3 ? nan : 5.0 - worker / 20;
    workers.push_back(worker);
  }
  const Given table{leg.data(), kReceivingColumns, 40};
  CHECK(!shortlist(table, 5, {0.05, 0.001}).workers.empty());
  Options options;
  options.add_wholes(table, {figures.data(), kFigures, 40}, workers);
  CHECK(!options.rank({0.05, 0.001}, 4).ties.empty());
}
