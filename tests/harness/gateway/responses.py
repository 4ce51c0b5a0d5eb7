"""Clients of /v1/responses, and what they make of its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from baton_gateway.responses.store import MemoryStore

from baton.clock import SystemClock

if TYPE_CHECKING:
    import openai

LAST = ("response.completed", "response.incomplete", "response.failed")


def with_store() -> MemoryStore:
    return MemoryStore(SystemClock(), ttl_s=60.0, bytes_max=64 << 20)


def strict_client(url: str, key: str = "none") -> openai.AsyncOpenAI:
    """Return a client that raises on answers and events that are not as its types say."""
    import openai  # It takes long, and unit tests use the rest of this module.

    plain = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=plain, _strict_response_validation=True
    )


def rebuilt(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the response that a client makes of its events; raises AssertionError if these are out of order."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert [event["type"] for event in events if event["type"] in LAST] == [events[-1]["type"]]
    items: list[dict[str, Any]] = []
    begun: list[str] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(dict[str, Any](event["item"]))
            begun.append(event["item"]["id"])
            continue
        if "output_index" not in event:
            continue
        item = items[int(event["output_index"])]
        if "item_id" in event:
            assert event["item_id"] == begun[-1] == item["id"]
        match kind:
            case "content_part.added":
                item["content"] = [*item["content"], dict[str, Any](event["part"])]
            case "output_text.delta" | "reasoning_text.delta":
                part: dict[str, Any] = item["content"][event["content_index"]]
                part["text"] += event["delta"]
                if "logprobs" in part:
                    part["logprobs"] = [*part["logprobs"], *event["logprobs"]]
            case "output_text.done" | "reasoning_text.done":
                assert item["content"][event["content_index"]]["text"] == event["text"]
            case "content_part.done":
                assert item["content"][event["content_index"]] == event["part"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert item["arguments"] == event["arguments"]
            case "output_item.done":
                item["status"] = event["item"]["status"]
                assert item == event["item"]
            case _:
                raise AssertionError(f"an unknown event: {event['type']}")
    response = events[-1]["response"]
    assert response["output"] == items
    return response
