"""The calculations of `make bench-gateway`, and its load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, cast

import pytest

from benchmarks.gateway import MEASURES, median_figures, rows_of
from benchmarks.gateway_contenders import WORKERS, role_of
from benchmarks.gateway_engine import Connection as EngineConnection
from benchmarks.gateway_engine import Engine
from benchmarks.gateway_load import HOST, PACED, Job, Outcome, carry_out, conversation, percentile, request
from benchmarks.gateway_page import digits, path_s, tables, token_figures
from benchmarks.processes import used_s


def test_a_percentile_is_one_of_the_values():
    values = [float(number) for number in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) == 0.0


def test_a_second_turn_continues_the_first_and_no_two_conversations_begin_alike():
    first, second = (conversation(3, 8, 100, turn) for turn in (1, 2))
    assert second[:1] == first
    assert [each["role"] for each in second] == ["user", "assistant", "user"]
    assert len(first[0]["content"].split()) == 102
    beginnings = {conversation(seed, number, 5, 1)[0]["content"][:4] for seed in range(3) for number in range(3)}
    assert len(beginnings) == 9


@pytest.mark.parametrize("paced", [False, True])
def test_a_request_states_its_length_and_its_pace(paced: bool):
    head, _, body = request(Job(port=1, model="m", paced=paced), 0).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    assert (PACED.encode() in body) is paced


def test_used_time_counts_threads_that_began_and_loses_those_that_ended():
    assert used_s({(1, 1): 5, (1, 2): 10**9}, {(1, 1): 10**9 + 5, (1, 3): 10**9}) == 2.0


def test_the_engines_are_not_on_the_path():
    assert path_s({"cpu_s gateway": 1.0, "cpu_s nats": 0.5, "cpu_s workers": 9.0, "ttft_p50_s": 3.0}) == 1.5


def test_a_tokens_cost_is_what_a_long_answer_costs_more():
    measures = {"32 clients": {"cpu_s gateway": 0.001}, "64 paced streams": {"cpu_s gateway": 0.0113, "reads": 4.0}}
    assert token_figures(measures, 101) == pytest.approx({"cpu_s gateway": 0.000103})


def test_a_figure_is_the_median_of_its_rounds_and_a_row_has_its_ratio_to_the_floor():
    ours = median_figures([{"cpu_s gateway": seconds} for seconds in (0.009, 0.003, 0.001)])
    assert ours == {"cpu_s gateway": 0.003}
    gateway, path = rows_of(
        {"baton": {"m": {**ours, "cpu_s nats": 0.001}}, "fastapi": {"m": {"cpu_s gateway": 0.001}}}
    )[::2]
    assert (gateway.unit, gateway.ours, gateway.peers, gateway.ratio) == ("ms", 3.0, {"fastapi": 1.0}, 3.0)
    assert (path.ours, path.ratio) == (4.0, 4.0)


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["/bin/python", "-m", "baton_gateway", "--port", "1"], "gateway"),
        (["/bin/python", "-m", "baton_prefill"], WORKERS),
        (["/lib/nats-server", "-c", "x"], "nats"),
        (["redis-server *:1"], "redis"),
        (["/bin/sh"], ""),
        ([], ""),
    ],
)
def test_a_process_of_a_deployment_has_a_role(command: list[str], role: str):
    assert role_of(command) == role


def test_figures_have_two_digits():
    assert [digits(value) for value in (0.0123, 1.26, 12.6, 1234.0, None)] == ["0.012", "1.3", "13", "1234", "–"]


def test_every_contender_has_a_line_in_every_table():
    figures = {
        **dict.fromkeys(("ttft_p50_s", "ttft_p99_s", "gap_p99_s", "requests_per_s"), 0.004),
        **dict.fromkeys(("tokens_per_s", "events_per_token", "reads_per_token"), 1.0),
        "cpu_s gateway": 0.002,
        "memory_bytes": 50e6,
    }
    ours = {**figures, "cpu_s gateway": 0.006, "cpu_s nats": 0.002, "cpu_s workers": 0.001}
    lines = list(
        tables({name: {each.name: of for each in MEASURES} for name, of in (("baton", ours), ("fastapi", figures))}, 2)
    )
    assert sum(line.startswith("| fastapi |") for line in lines) == 4
    assert "| baton | 6 (3 ×) | 6 (3 ×) | 6 (3 ×) | 8 (4 ×) | 8 (4 ×) | 2 | 1 | 50 |" in lines


async def outcome_of(protocol: Callable[[], asyncio.Protocol], **job: Any) -> Outcome:
    """Return what the load sees of a server with this protocol."""
    server = await asyncio.get_running_loop().create_server(protocol, HOST, 0)
    async with server:
        return await carry_out(Job(port=server.sockets[0].getsockname()[1], model="m", seconds=5.0, **job))


@pytest.mark.parametrize("job", [{"concurrency": 3}, {"rate_per_s": 5000.0}])
async def test_the_load_gets_every_token_of_the_instant_engine(job: dict[str, Any]):
    engine = Engine()
    outcome = await outcome_of(lambda: EngineConnection(engine), requests_max=7, tokens=4, **job)
    assert (outcome.failure, outcome.answers) == ("", 7)
    assert outcome.events == 7 * (1 + 4 + 1)  # The role, the tokens, the reason of the end.
    assert 0 < outcome.ttft_p50_s <= outcome.ttft_p99_s


class Impatient(EngineConnection):
    """An instant engine that answers its first of two requests, closes that connection, and then answers the other."""

    asked: ClassVar[list[Impatient]] = []

    def on_message_complete(self) -> None:
        self.asked.append(self)
        if len(self.asked) == 2:
            self.asked[0].answer()
            self.asked[0]._transport.close()

    def answer(self) -> None:
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self is self.asked[0]:
            # Not before the client has seen the end of the other connection.
            asyncio.get_running_loop().call_later(0.02, self.asked[1].answer)


async def test_a_server_may_close_a_connection_that_waits_for_no_answer():
    engine = Engine()
    outcome = await outcome_of(lambda: Impatient(engine), requests_max=2, concurrency=2)
    assert (outcome.failure, outcome.answers) == ("", 2)


class Refusing(asyncio.Protocol):
    """A server that answers with an error, or not at all."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(self._answer)
        self._transport.close()


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n", "an answer is an error"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", "an answer has no token or no end"),
        (b"", "a connection was lost"),
    ],
)
@pytest.mark.parametrize("rate_per_s", [0.0, 5000.0])
async def test_the_load_says_what_a_server_did_wrong(answer: bytes, failure: str, rate_per_s: float):
    outcome = await outcome_of(lambda: Refusing(answer), requests_max=3, rate_per_s=rate_per_s)
    assert failure in outcome.failure
    assert outcome.answers == 0
