#include "placement/terms.h"

namespace baton::placement {
namespace {

Term row(const char* name, const Given& leg, std::size_t number) {
  return {name, [numbers = leg[number]](std::size_t worker) { return numbers[worker]; }};
}

}  // namespace

std::vector<Term> computing_terms(const Given& leg, bool promotes, bool lends) {
  const auto promotion_s = [=](std::size_t worker) { return promotes ? leg[kPromotionS][worker] : 0.0; };
  const auto loan_s = [=](std::size_t worker) { return lends ? leg[kLoanS][worker] : 0.0; };
  std::vector<Term> terms{
      row("cost_s", leg, kCostS),
      row("waiting_s", leg, kWaitingS),
      row("queue_s", leg, kQueueS),
      {"own_s", [=](std::size_t worker) { return leg[kOwnS][worker] - promotion_s(worker) - loan_s(worker); }},
  };
  if (promotes) terms.push_back(row("promotion_s", leg, kPromotionS));
  if (lends) terms.push_back(row("loan_s", leg, kLoanS));
  terms.push_back({"others_s", [=](std::size_t worker) {
                     const double own_s = leg[kWaitingS][worker] + leg[kQueueS][worker] + leg[kOwnS][worker];
                     return leg[kCostS][worker] - own_s - leg[kPressureS][worker];
                   }});
  terms.push_back(row("pressure_s", leg, kPressureS));
  terms.push_back(row("cached_tokens", leg, kCachedTokens));
  if (promotes) terms.push_back(row("promoted_tokens", leg, kPromotedTokens));
  if (lends) terms.push_back(row("borrowed_tokens", leg, kBorrowedTokens));
  return terms;
}

std::vector<Term> receiving_terms(const Given& leg, bool promotes) {
  std::vector<Term> terms{
      row("cost_s", leg, kCostS),
      row("waiting_s", leg, kWaitingS),
      {"interval_s",
       [=](std::size_t worker) { return leg[kCostS][worker] - leg[kWaitingS][worker] - leg[kPressureS][worker]; }},
      row("pressure_s", leg, kPressureS),
      row("pull_s", leg, kPullS),
      row("cached_tokens", leg, kCachedTokens),
  };
  if (promotes) terms.push_back(row("promoted_tokens", leg, kPulledPromotedTokens));
  return terms;
}

}  // namespace baton::placement
