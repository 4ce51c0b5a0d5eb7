// The shortlist of a leg's workers, and the best of all placements that shortlisted workers make.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "placement/legs.h"

namespace baton::placement {

// Costs that tie with the best: within a share of it, or within a time, whichever is more.
struct Ties {
  double share = 0;
  double time_s = 0;

  [[nodiscard]] double limit_s(double best_s) const;
};

struct Shortlist {
  std::vector<std::uint32_t> workers;
  bool is_crowded = false;  // Whether the workers are all near-ties, in order, which are more than were asked for.
};

// Returns the workers of a leg with the lowest costs, the best first, or all near-ties where these are more than
// `count`.
Shortlist shortlist(const Given& leg, std::size_t count, const Ties& ties);

// Returns the same of a leg that pulls the KV, with what is left of each pull after `own_s`, the time of the prompt.
Shortlist shortlist_pulls(const Given& leg, double own_s, std::size_t count, const Ties& ties);

// One placement: of a worker that computes the prompt where it decodes, or a pair.
struct Option {
  double cost_s = 0;
  double cached_tokens = 0;
  double decode_cached_tokens = 0;
  double used_share = 0;   // Of the worker that decodes.
  std::uint32_t pool = 0;  // Number of the pool, in the order in which they were added.
  std::uint32_t computes = 0;
  std::optional<std::uint32_t> pulls;  // None: no transfer.
};

struct Ranking {
  std::vector<Option> ties;     // Near-ties with the most cached tokens, and without a transfer if one has none.
  std::vector<Option> best;     // The lowest costs, the best first.
  std::optional<Option> whole;  // The best without a transfer,
  std::optional<Option> pair;   // and the best with one.
};

class Options {
 public:
  // Adds these workers of a leg that computes the prompt.
  void add_wholes(const Given& leg, const Given& figures, std::span<const std::uint32_t> workers);

  // Adds the pairs of these workers of two legs. `bandwidth`: of each sink with each source, all of a sink's in a row;
  // 0: these two make no pair. `overlap`: share of the prompt's time in which KV moves already.
  void add_pairs(const Given& source, const Given& sink, const Given& sink_figures,
                 std::span<const std::uint32_t> sources, std::span<const std::uint32_t> sinks,
                 std::span<const double> bandwidth, double overlap);

  // Returns `count` of the lowest costs, and the others. There must be an option.
  [[nodiscard]] Ranking rank(const Ties& ties, std::size_t count) const;

  [[nodiscard]] bool empty() const { return options_.empty(); }

 private:
  std::vector<Option> options_;
  std::uint32_t pools_ = 0;
};

}  // namespace baton::placement
