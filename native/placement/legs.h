// Predicted times and costs of one attempt on the workers of a team: the part of each worker in a placement.
//
// All is plain arithmetic of doubles in a stated order, without contraction, so that a decision is the same on every
// machine. Tokens are whole numbers below 2^53.
#pragma once

#include <cstddef>
#include <span>

namespace baton::placement {

// What a worker is judged by, one row each in a table with a column for each worker. Rows that a placement changes come
// first.
enum Figure : std::size_t {
  kComputesUntilS,
  kHalfIntervalS,
  kIntervalS,
  kKvShare,
  kNextIntervalS,
  kSlotsLacking,
  kTokensFree,
  kUsedShare,
  kBlockTokens,
  kComputeWeight,
  kContextTokensMax,
  kKvBytesPerToken,
  kKvTokensMax,
  kPairS,
  kPoolTokensFree,
  kPromotedTokenS,
  kFiledTokenS,
  kReady,
  kSharedShare,
  kStepS,
  kStepTokensMax,
  kTokenS,
  kBandwidth,
  kFigures
};

// Rows of a leg's table that every leg has.
enum Column : std::size_t { kWaitingS, kPressureS, kCachedTokens, kCostS, kColumns };

// Rows of a leg that computes the prompt: without tiers to promote from, the first six; without lenders, the first
// eight.
enum ComputingColumn : std::size_t {
  kQueueS = kColumns,
  kOwnS,
  kComputingPlain,
  kPromotedTokens = kComputingPlain,
  kPromotionS,
  kComputingTiered,
  kBorrowedTokens = kComputingTiered,
  kLoanS,
  kLoanBoundS,
  kLender,
  kComputingColumns
};

// Rows of a leg that pulls the KV: without tiers, the first six.
enum ReceivingColumn : std::size_t {
  kMissingBytes = kColumns,
  kPullS,
  kReceivingPlain,
  kPulledPromotedTokens = kReceivingPlain,
  kReceivingColumns
};

// Rows of numbers, one after another, with a column for each worker.
template <typename Number>
struct Rows {
  Number* data = nullptr;
  std::size_t rows = 0;
  std::size_t workers = 0;

  std::span<Number> operator[](std::size_t row) const { return {data + row * workers, workers}; }
};
using Given = Rows<const double>;
using Filled = Rows<double>;

struct Weights {
  double wait_s = 0;      // For all the room that an attempt lacks.
  double pressure_s = 0;  // For all KV in use where it decodes.
  double memory_s = 0;    // For all KV of a worker that the attempt takes.
  double displaced = 0;   // For each second of prompts that a loan displaces.
};

struct Demand {
  double prompt_tokens = 0;
  double need_tokens = 0;  // Room that the attempt takes where it shares nothing.
  double now_s = 0;
  bool decodes = false;  // Whether it also decodes on these workers.
};

// Workers that could lend, and each one's links to the workers of the leg.
struct Lenders {
  std::span<const double> tokens;     // Leading tokens of the prompt that each can lend.
  std::span<const double> bandwidth;  // Of each lender to each worker, bytes per second; 0: it cannot lend there.
  std::span<const double> bound_ratio;
  double ask_s = 0;  // Time to ask for a loan.
};

// Fills the rows of a leg that computes the prompt. `blocks`: leading blocks that each worker has on its device, then
// down to its pool, then down to its file; one to three rows.
void compute(const Given& figures, const Given& blocks, const Demand& demand, const Weights& weights,
             const Lenders& lenders, const Filled& leg);

// Fills the rows of a leg that pulls the KV.
void receive(const Given& figures, const Given& blocks, const Demand& demand, const Weights& weights,
             const Filled& leg);

}  // namespace baton::placement
