"""The gateway's spans: one tree per request, whatever its outcome. Actors play the scheduler and the workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import httpx
import msgspec
import pytest
from baton_gateway.config import Settings
from opentelemetry.trace import SpanKind

from baton.messages.codec import decode, encode
from baton.messages.traces import SpanRecord, TracePage
from tests.harness.gateway.actors import MODEL
from tests.harness.gateway.stage import Stage, forward, open_stage
from tests.harness.limits import HANG_S
from tests.harness.telemetry import Trace, TracedSpan

CHAT = "/v1/chat/completions"
CLIENT_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN = "00f067aa0ba902b7"


@pytest.fixture(params=[1.0])
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    async with open_stage(Settings(port=0, trace_share=request.param, accept_s=0.5, attempts_max=2)) as opened:
        opened.say("the quick brown fox jumps over the lazy dog")
        opened.workers["d1"].script.interval_s = 0.001
        yield opened


async def ask(stage: Stage, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0, **fields}
    async with httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client:
        return await client.post(CHAT, json=body, headers=headers)


def exported(stage: Stage) -> list[TracedSpan]:
    return [
        TracedSpan(
            trace=record.trace,
            span=record.span,
            parent=record.parent,
            name=record.name,
            start_ns=record.start_ns,
            end_ns=record.end_ns,
            error=record.error,
            attributes=cast("dict[str, object]", record.attributes),
            links=record.links,
            kind=record.kind,
        )
        for record in stage.spans
    ]


async def trace_of(stage: Stage, roots: int = 1) -> Trace:
    """Wait until the gateway has ended its spans, and return them."""
    await stage.wait_for(lambda: sum(span.name.startswith("chat") for span in exported(stage)) == roots)
    return Trace(exported(stage))


def attributes_of(span: TracedSpan, *prefixes: str) -> dict[str, object]:
    return {name: value for name, value in span.attributes.items() if name.startswith(prefixes)}


async def test_a_request_is_one_tree_with_current_conventions(stage: Stage) -> None:
    answer = await ask(
        stage, {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01", "x-request-id": "mine"}, max_tokens=50, n=1
    )
    trace = await trace_of(stage)
    assert (trace.root.trace, trace.root.parent) == (CLIENT_TRACE, CLIENT_SPAN), "the client's own trace is continued"
    assert trace.root.name == f"chat {MODEL}"
    assert trace.root.kind == SpanKind.SERVER.value
    said = attributes_of(trace.root, "gen_ai.", "baton.request_id")
    assert said == {
        "baton.request_id": "mine",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": (answer.json()["choices"][0]["finish_reason"],),
        "gen_ai.usage.input_tokens": answer.json()["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": answer.json()["usage"]["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"],
    }
    assert [span.name for span in trace.below(trace.root)] == ["read", "tokenise", "attempt", "send"]
    (attempt,) = trace.named("attempt")
    assert [span.name for span in trace.below(attempt)] == ["place", "dispatch", "first token", "stream"]
    placed = attributes_of(attempt, "baton.placement", "baton.predicted")
    assert placed["baton.placement.decode"] == "d1"
    assert placed["baton.placement.reason"]
    assert {"baton.predicted.ttft_s", "baton.predicted.cached_tokens"} <= placed.keys()
    ttft_s = attempt.attributes["baton.ttft_s"]
    assert isinstance(ttft_s, float)
    assert ttft_s > 0
    assert "baton.cached_tokens" in attempt.attributes


async def test_prompts_and_answers_stay_out_of_traces(stage: Stage) -> None:
    await ask(stage, user="secret-user", messages=[{"role": "user", "content": "a secret prompt"}])
    await trace_of(stage)
    everything = str([span.attributes for span in exported(stage)])
    assert "secret" not in everything
    assert "quick brown" not in everything


async def test_the_number_of_spans_does_not_depend_on_the_number_of_tokens(stage: Stage) -> None:
    counts: list[int] = []
    for tokens in (2, 200):
        stage.spans.clear()
        stage.say("word " * tokens)
        await ask(stage, stream=True)
        counts.append(len((await trace_of(stage)).spans))
    assert counts[0] == counts[1]


async def test_a_retry_is_a_sibling_with_a_link_to_the_attempt_that_failed(stage: Stage) -> None:
    await stage.add("d2")
    await forward(stage, "d2")
    stage.workers["d1"].script.silent = True
    assert (await ask(stage)).status_code == 200
    trace = await trace_of(stage)
    failed, again = trace.named("attempt")
    assert failed.parent == again.parent == trace.root.span
    assert again.links == (failed.span,)
    assert (failed.attributes["baton.attempt"], again.attributes["baton.attempt"]) == (0, 1)
    assert failed.attributes["error.type"] == "worker_lost"
    assert "d1" in failed.error
    assert not again.error
    assert not trace.root.error, "the request itself went well"
    (silent,) = [span for span in trace.named("dispatch") if span.parent == failed.span]
    assert silent.attributes["error.type"] == "deadline_exceeded"


async def test_each_choice_has_its_own_attempt(stage: Stage) -> None:
    assert (await ask(stage, n=3)).status_code == 200
    trace = await trace_of(stage)
    assert trace.root.attributes["gen_ai.request.choice.count"] == 3
    requests = {span.attributes["baton.request"] for span in trace.named("attempt")}
    assert requests == {f"{trace.root.attributes['baton.request']}-{choice}" for choice in range(3)}
    assert not any(span.links for span in trace.named("attempt"))


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize("stage", [0.0], indirect=True)
async def test_of_what_is_not_sampled_only_failures_are_exported(stage: Stage) -> None:
    assert (await ask(stage)).status_code == 200
    assert (await ask(stage, messages=[])).status_code == 400
    assert (await ask(stage, {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-00"})).status_code == 200
    assert exported(stage) == []
    stage.workers["d1"].script.silent = True
    assert (await ask(stage)).status_code >= 500
    trace = await trace_of(stage)
    assert {"read", "tokenise", "attempt", "dispatch"} <= {span.name for span in trace.spans.values()}
    assert trace.root.error


@pytest.mark.parametrize("stage", [0.0], indirect=True)
async def test_an_attempt_that_is_tried_again_has_its_whole_trace_exported(stage: Stage) -> None:
    await stage.add("d2")
    await forward(stage, "d2")
    stage.workers["d1"].script.silent = True
    assert (await ask(stage)).status_code == 200
    trace = await trace_of(stage)
    assert len(trace.named("attempt")) == 2
    assert not trace.root.error


@pytest.mark.parametrize("stage", [0.0], indirect=True)
async def test_a_client_that_asks_for_its_trace_gets_it(stage: Stage) -> None:
    await ask(stage, {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"})
    assert (await trace_of(stage)).root.trace == CLIENT_TRACE


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({"messages": []}, "invalid_request"), ({"model": "nobody"}, "model_not_found"), ({"n": 0}, "invalid_request")],
)
async def test_what_the_client_did_wrong_is_noted_but_no_failure(
    stage: Stage, fields: dict[str, Any], kind: str
) -> None:
    assert (await ask(stage, **fields)).status_code in (400, 404)
    (root, *_) = [span for span in exported(stage) if span.attributes.get("baton.request_id")]
    assert root.attributes["error.type"] == kind
    assert not root.error


async def test_busy_workers_are_no_failures_either(stage: Stage) -> None:
    stage.workers["d1"].script.capacity = 0
    answer = await ask(stage, {"x-baton-deadline-s": "2"})
    assert answer.status_code >= 429
    trace = await trace_of(stage)
    attempts: Sequence[TracedSpan] = trace.named("attempt")
    assert len(attempts) > 1
    assert all(not attempt.error for attempt in attempts[:-1])
    assert {attempt.attributes.get("error.type") for attempt in attempts[:-1]} == {"overloaded"}
    assert trace.named("queue"), "it waited for a worker to become free"


async def test_without_tracing_requests_are_served_and_tried_again() -> None:
    async with open_stage(Settings(port=0, accept_s=0.1, tracing=False)) as stage:
        stage.say("some words")
        await stage.add("d2")
        await forward(stage, "d2")
        stage.workers["d1"].script.silent = True
        assert (await ask(stage)).status_code == 200
        assert stage.scheduler.places[-1].context.attempt == 1
        assert not exported(stage)


def test_records_survive_the_bus_as_they_are() -> None:
    record = SpanRecord(
        trace="a" * 32,
        span="b" * 16,
        name="chat",
        start_ns=1 << 62,
        attributes={"reasons": ("stop",), "share": 0.5, "count": 3, "open": True, "name": "x"},
        links=("c" * 16,),
    )
    page = TracePage(service="gateway", instance="gw-1", host="here", spans=(record,))
    assert decode(encode(page)) == page
    assert msgspec.to_builtins(record)["attributes"]["open"] is True
