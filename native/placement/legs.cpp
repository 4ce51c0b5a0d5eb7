#include "placement/legs.h"

#include <algorithm>
#include <cmath>

namespace baton::placement {
namespace {

// The time of computing the last tokens of a prompt, and the same with the sequences in its steps.
struct Prompt {
  double prompt_s = 0;
  double with_sequences_s = 0;
};

// Tokens that a worker has beyond its device, down to a tier, and the time to bring them to the device.
struct Stored {
  double tokens = 0;
  double fetching_s = 0;
};

struct Loan {
  double tokens = 0;  // 0: none pays.
  double loan_s = 0;
  double bound_s = 0;
  Prompt rest;
  double displaced_s = 0;
  std::size_t lender = 0;
};

// One worker of a leg.
class Worker {
 public:
  Worker(const Given& figures, const Given& blocks, const Demand& demand, std::size_t index)
      : figures_(figures), blocks_(blocks), demand_(demand), index_(index) {}

  double operator[](Figure figure) const { return figures_[figure][index_]; }

  // Prompt tokens of which it has the leading blocks, down to a tier. The last token is always computed.
  [[nodiscard]] double reach(std::size_t tier) const {
    return std::min(blocks_[tier][index_] * (*this)[kBlockTokens], demand_.prompt_tokens - 1);
  }

  [[nodiscard]] Prompt prompt(double uncached_tokens) const {
    const double steps = std::ceil(uncached_tokens / (*this)[kStepTokensMax]);
    // end² − start²
    const double pairs = uncached_tokens * (demand_.prompt_tokens + (demand_.prompt_tokens - uncached_tokens));
    const double prompt_s = (*this)[kStepS] * steps + (*this)[kTokenS] * uncached_tokens + (*this)[kPairS] * pairs;
    return {prompt_s, prompt_s + (*this)[kIntervalS] * steps};
  }

  // What it has beyond the device, down to the pool (tier 1) or the file (tier 2).
  [[nodiscard]] Stored stored(std::size_t tier, double cached_tokens) const {
    const double pooled = std::max(reach(1) - cached_tokens, 0.0);
    Stored found{pooled, pooled * (*this)[kPromotedTokenS]};
    if (tier == 1) return found;
    const double filed = std::max(reach(2) - cached_tokens - pooled, 0.0);
    return {pooled + filed, found.fetching_s + filed * (*this)[kFiledTokenS]};
  }

  // The best loan where it has `own_tokens` of the prompt already, on its device or promoted.
  [[nodiscard]] Loan loan(const Lenders& lenders, double own_tokens) const {
    const std::size_t workers = figures_.workers;
    const Prompt whole = prompt(demand_.prompt_tokens - own_tokens);
    Loan best;
    double least_s = whole.with_sequences_s;
    for (std::size_t lender = 0; lender < lenders.tokens.size(); ++lender) {
      const double bandwidth = lenders.bandwidth[lender * workers + index_];
      const double tokens = std::min(lenders.tokens[lender], demand_.prompt_tokens - 1) - own_tokens;
      if (tokens <= 0 || bandwidth <= 0) continue;
      const double loan_s = lenders.ask_s + tokens * ((*this)[kKvBytesPerToken] / bandwidth + (*this)[kPromotedTokenS]);
      const double bound_s = loan_s * lenders.bound_ratio[lender * workers + index_];
      const Prompt rest = prompt(demand_.prompt_tokens - own_tokens - tokens);
      if (bound_s + rest.with_sequences_s >= least_s) continue;
      least_s = bound_s + rest.with_sequences_s;
      const double displaced_share = std::max(1 - (*this)[kPoolTokensFree] / std::max(tokens, 1.0), 0.0);
      best = {tokens, loan_s, bound_s, rest, displaced_share * (whole.prompt_s - rest.prompt_s), lender};
    }
    return best;
  }

 private:
  const Given& figures_;
  const Given& blocks_;
  const Demand& demand_;
  std::size_t index_;
};

// Fills what every leg has but the cost, with the tokens that are cached on the device.
void fill_room(const Given& figures, const Given& blocks, const Demand& demand, const Weights& weights,
               const Filled& leg) {
  double shared_most = 0;
  for (std::size_t index = 0; index < figures.workers; ++index) {
    const Worker worker(figures, blocks, demand, index);
    const double cached_tokens = worker.reach(0);
    // Tokens of the prompt that the attempt shares with others take no room.
    const double shared_tokens = cached_tokens * worker[kSharedShare];
    const double lacking = (demand.need_tokens - shared_tokens - worker[kTokensFree]) / worker[kKvTokensMax];
    leg[kCachedTokens][index] = cached_tokens;
    leg[kWaitingS][index] = weights.wait_s * std::max(lacking, worker[kSlotsLacking]);
    leg[kPressureS][index] = shared_tokens / worker[kKvTokensMax];
    shared_most = std::max(shared_most, leg[kPressureS][index]);
  }
  // The KV in use, and what the attempt takes beyond the worker where it shares most.
  for (std::size_t index = 0; index < figures.workers; ++index) {
    double& pressure_s = leg[kPressureS][index];
    pressure_s = demand.decodes
                     ? weights.pressure_s * figures[kKvShare][index] + weights.memory_s * (shared_most - pressure_s)
                     : 0.0;
  }
}

}  // namespace

void compute(const Given& figures, const Given& blocks, const Demand& demand, const Weights& weights,
             const Lenders& lenders, const Filled& leg) {
  fill_room(figures, blocks, demand, weights, leg);
  for (std::size_t index = 0; index < figures.workers; ++index) {
    const Worker worker(figures, blocks, demand, index);
    const double cached_tokens = leg[kCachedTokens][index];
    // A prompt enters with the next step: on average, half of the present one is left.
    const double queue_s = std::max(worker[kComputesUntilS] - demand.now_s, worker[kHalfIntervalS]);
    const Prompt whole = worker.prompt(demand.prompt_tokens - cached_tokens);
    double prompt_s = whole.prompt_s, own_s = whole.with_sequences_s;
    Stored promoted;
    for (std::size_t tier = 1; tier < blocks.rows; ++tier) {
      const Stored stored = worker.stored(tier, cached_tokens);
      const Prompt rest = worker.prompt(demand.prompt_tokens - cached_tokens - stored.tokens);
      if (stored.fetching_s + rest.with_sequences_s >= own_s) continue;
      promoted = stored;
      prompt_s = rest.prompt_s;
      own_s = stored.fetching_s + rest.with_sequences_s;
    }
    Loan borrowed;
    // A borrower promotes what its own pool has, too.
    for (std::size_t tier = blocks.rows > 1 ? 1 : 0; tier < blocks.rows && !lenders.tokens.empty(); ++tier) {
      const Stored stored = tier ? worker.stored(tier, cached_tokens) : Stored{};
      const Loan loan = worker.loan(lenders, cached_tokens + stored.tokens);
      if (loan.tokens <= 0 || stored.fetching_s + loan.bound_s + loan.rest.with_sequences_s >= own_s) continue;
      promoted = stored;
      borrowed = loan;
      prompt_s = loan.rest.prompt_s;
      own_s = stored.fetching_s + loan.loan_s + loan.rest.with_sequences_s;
    }
    leg[kQueueS][index] = queue_s;
    leg[kOwnS][index] = own_s;
    leg[kCostS][index] = leg[kWaitingS][index] + queue_s + own_s + worker[kComputeWeight] * prompt_s +
                         leg[kPressureS][index] + weights.displaced * borrowed.displaced_s;
    leg[kCachedTokens][index] += promoted.tokens;
    if (leg.rows > kComputingPlain) {
      leg[kPromotedTokens][index] = promoted.tokens;
      leg[kPromotionS][index] = promoted.fetching_s;
    }
    if (leg.rows > kComputingTiered) {
      leg[kBorrowedTokens][index] = borrowed.tokens;
      leg[kLoanS][index] = borrowed.loan_s;
      leg[kLoanBoundS][index] = borrowed.bound_s;
      leg[kLender][index] = static_cast<double>(borrowed.lender);
    }
  }
}

void receive(const Given& figures, const Given& blocks, const Demand& demand, const Weights& weights,
             const Filled& leg) {
  fill_room(figures, blocks, demand, weights, leg);
  for (std::size_t index = 0; index < figures.workers; ++index) {
    const Worker worker(figures, blocks, demand, index);
    const double cached_tokens = leg[kCachedTokens][index];
    double promoted_tokens = 0, saved_s = 0;
    for (std::size_t tier = 1; tier < blocks.rows; ++tier) {
      const Stored stored = worker.stored(tier, cached_tokens);
      const double here_s = stored.tokens * worker[kKvBytesPerToken] / worker[kBandwidth] - stored.fetching_s;
      if (here_s <= saved_s) continue;
      promoted_tokens = stored.tokens;
      saved_s = here_s;
    }
    const double missing_bytes = (demand.prompt_tokens - (cached_tokens + promoted_tokens)) * worker[kKvBytesPerToken];
    leg[kCachedTokens][index] = cached_tokens + promoted_tokens;
    leg[kCostS][index] = leg[kWaitingS][index] + worker[kNextIntervalS] + leg[kPressureS][index];
    leg[kMissingBytes][index] = missing_bytes;
    leg[kPullS][index] = missing_bytes / worker[kBandwidth];
    if (leg.rows > kReceivingPlain) leg[kPulledPromotedTokens][index] = promoted_tokens;
  }
}

}  // namespace baton::placement
