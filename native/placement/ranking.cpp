#include "placement/ranking.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace baton::placement {
namespace {

bool is_cheaper(const Option& one, const Option& other) {
  return one.cost_s < other.cost_s;
}

// What decides between near-ties.
std::tuple<double, double, bool> merit(const Option& option) {
  return {option.cached_tokens, option.decode_cached_tokens, !option.pulls};
}

Shortlist shortlist_of(std::span<const double> cost_s, std::size_t count, const Ties& ties) {
  Shortlist list;
  if (cost_s.empty() || count == 0) return list;
  const double limit_s = ties.limit_s(*std::min_element(cost_s.begin(), cost_s.end()));
  for (std::uint32_t worker = 0; worker < cost_s.size(); ++worker) {
    if (cost_s[worker] <= limit_s) list.workers.push_back(worker);
  }
  list.is_crowded = list.workers.size() > count;
  if (list.is_crowded) return list;
  list.workers.resize(cost_s.size());
  std::iota(list.workers.begin(), list.workers.end(), 0u);
  const auto kept = list.workers.begin() + static_cast<std::ptrdiff_t>(std::min(count, cost_s.size()));
  std::partial_sort(list.workers.begin(), kept, list.workers.end(), [&](std::uint32_t one, std::uint32_t other) {
    return std::tie(cost_s[one], one) < std::tie(cost_s[other], other);
  });
  list.workers.erase(kept, list.workers.end());
  return list;
}

}  // namespace

double Ties::limit_s(double best_s) const {
  return best_s + std::max(best_s * share, time_s);
}

Shortlist shortlist(const Given& leg, std::size_t count, const Ties& ties) {
  return shortlist_of(leg[kCostS], count, ties);
}

Shortlist shortlist_pulls(const Given& leg, double own_s, std::size_t count, const Ties& ties) {
  std::vector<double> cost_s(leg.workers);
  for (std::size_t worker = 0; worker < leg.workers; ++worker) {
    cost_s[worker] = leg[kCostS][worker] + std::max(leg[kPullS][worker] - own_s, 0.0);
  }
  return shortlist_of(cost_s, count, ties);
}

void Options::add_wholes(const Given& leg, const Given& figures, std::span<const std::uint32_t> workers) {
  for (const std::uint32_t worker : workers) {
    const double cached_tokens = leg[kCachedTokens][worker];
    options_.push_back(
        {leg[kCostS][worker], cached_tokens, cached_tokens, figures[kUsedShare][worker], pools_, worker, std::nullopt});
  }
  ++pools_;
}

void Options::add_pairs(const Given& source, const Given& sink, const Given& sink_figures,
                        std::span<const std::uint32_t> sources, std::span<const std::uint32_t> sinks,
                        std::span<const double> bandwidth, double overlap) {
  const double* rate = bandwidth.data();
  for (const std::uint32_t pulls : sinks) {
    for (const std::uint32_t computes : sources) {
      const double bytes_per_s = *rate++;
      if (bytes_per_s <= 0) continue;
      const double left_s = sink[kMissingBytes][pulls] / bytes_per_s - overlap * source[kOwnS][computes];
      const double cost_s = source[kCostS][computes] + sink[kCostS][pulls] + std::max(left_s, 0.0);
      options_.push_back({cost_s, source[kCachedTokens][computes], sink[kCachedTokens][pulls],
                          sink_figures[kUsedShare][pulls], pools_, computes, pulls});
    }
  }
  ++pools_;
}

Ranking Options::rank(const Ties& ties, std::size_t count) const {
  Ranking ranking;
  const double limit_s = ties.limit_s(std::min_element(options_.begin(), options_.end(), is_cheaper)->cost_s);
  for (const Option& option : options_) {
    std::optional<Option>& best = option.pulls ? ranking.pair : ranking.whole;
    if (!best || is_cheaper(option, *best)) best = option;
    if (option.cost_s > limit_s) continue;
    if (!ranking.ties.empty() && merit(option) < merit(ranking.ties.front())) continue;
    if (!ranking.ties.empty() && merit(ranking.ties.front()) < merit(option)) ranking.ties.clear();
    ranking.ties.push_back(option);
  }
  ranking.best = options_;
  std::stable_sort(ranking.best.begin(), ranking.best.end(), is_cheaper);
  ranking.best.resize(std::min(count, ranking.best.size()));
  return ranking;
}

}  // namespace baton::placement
