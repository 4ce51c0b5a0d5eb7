// State that a sink keeps of one connection to a source: chunks in flight, since when an answer is owed, speed.
#include "transfer/lane.h"

#include <cmath>

#include "tests/check.h"

using namespace baton::transfer;

TEST(lanes_know_what_is_under_way) {
  Lane lane;
  lane.ask_for(1.0, 100);
  lane.ask_for(2.0, 50);
  CHECK(lane.in_flight == 2 && lane.in_flight_bytes == 150 && lane.asked_bytes == 150);
  lane.let_go(100);
  CHECK(lane.in_flight == 1 && lane.in_flight_bytes == 50);
  lane.finish(3.0, 50);
  CHECK(lane.in_flight == 0 && lane.in_flight_bytes == 0 && lane.asked_bytes == 150);
}

TEST(lanes_owe_an_answer_while_something_is_under_way) {
  Lane lane;
  CHECK(lane.owed_since_s == Lane::kNever);
  lane.ask_for(1.0, 100);
  lane.ask_for(2.0, 100);
  CHECK(lane.owed_since_s == 1.0);
  lane.suspected_s = 2.5;
  lane.hear(3.0);
  CHECK(lane.owed_since_s == 3.0 && lane.suspected_s == Lane::kNever);
  lane.let_go(100);
  CHECK(lane.owed_since_s == 3.0);
  lane.let_go(100);
  CHECK(lane.owed_since_s == Lane::kNever);
  lane.expect_answer(4.0);  // The answer to a keep-alive.
  lane.expect_answer(5.0);
  CHECK(lane.owed_since_s == 4.0);
  lane.hear(6.0);
  CHECK(lane.owed_since_s == Lane::kNever && lane.heard_s == 6.0);
}

TEST(lanes_measure_how_fast_they_are_while_they_are_busy) {
  const auto about = [](double speed, double expected) { return std::abs(speed / expected - 1) < 1e-6; };
  Lane lane;
  lane.ask_for(1.0, 1000);
  lane.ask_for(1.0, 1000);
  lane.finish(1.006, 1000);
  CHECK(lane.bytes_per_s == 0);  // Too short to measure.
  lane.finish(1.012, 1000);
  CHECK(about(lane.bytes_per_s, 2000 / 0.012));
  CHECK(lane.speed(1.5) == lane.bytes_per_s && lane.speed(2.1) == 0);  // It may be another by then.
  lane.ask_for(7.0, 1000);                                             // After a while with nothing to do.
  CHECK(lane.speed(9.0) == lane.bytes_per_s);
  lane.finish(7.012, 1000);
  CHECK(about(lane.bytes_per_s, (0.8 * 2000 + 0.2 * 1000) / 0.012));
}
