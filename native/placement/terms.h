// The parts of each worker's cost by name, for whoever asks why it was chosen.
#pragma once

#include <functional>
#include <vector>

#include "placement/legs.h"

namespace baton::placement {

struct Term {
  const char* name;
  std::function<double(std::size_t worker)> value;
};

// Returns the terms of a leg that computes the prompt: `cost_s` first, then its parts, then tokens. They refer to the
// leg.
std::vector<Term> computing_terms(const Given& leg, bool promotes, bool lends);

// Returns the terms of a leg that pulls the KV, with the time of the pull, of which only the tail is added to a pair.
std::vector<Term> receiving_terms(const Given& leg, bool promotes);

}  // namespace baton::placement
