"""Routing of digests: to the answers in which the worker currently takes part, and to none that have ended."""

from __future__ import annotations

from baton_gateway.routes import Routes

from tests.harness.gateway.attempt_harness import AttemptHarness


def answer(routes: Routes[AttemptHarness], request: str, decode: str, prefill: str = "") -> AttemptHarness:
    bench = AttemptHarness()
    routes.enter(request, bench)
    bench.run_on(decode, prefill)
    for worker in filter(None, (decode, prefill)):
        routes.give(request, worker)
    return bench


def on(routes: Routes[AttemptHarness], worker: str) -> list[str]:
    return [request for request, _ in routes.running_on(worker)]


def test_answers_are_found_by_worker_in_the_order_in_which_they_came() -> None:
    routes = Routes[AttemptHarness]()
    for request in ("c", "a", "b"):
        answer(routes, request, "d1", "p1" if request == "a" else "")
    assert on(routes, "d1") == ["c", "a", "b"]
    assert on(routes, "p1") == ["a"]
    assert on(routes, "stranger") == []
    routes.leave("a")
    assert on(routes, "d1") == ["c", "b"]
    assert (on(routes, "p1"), routes.get("a"), len(routes)) == ([], None, 2)


def test_a_worker_of_an_attempt_that_is_over_has_no_part_any_more() -> None:
    routes = Routes[AttemptHarness]()
    bench = answer(routes, "r", "d1")
    bench.now_s += 200.0
    bench.wait(0.0)
    bench.run_on("d2")
    routes.give("r", "d2")
    assert (on(routes, "d1"), on(routes, "d2")) == ([], ["r"])
