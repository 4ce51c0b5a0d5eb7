"""Clients that stream one answer after another and compare each with an undisturbed run of its prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import httpx

from tests.faults.record import Stream

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "seven", "wizards", "box")
SILENCE_S = 60.0
"""A stream without an event for this long has failed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    output_tokens: int


def make_prompts(count: int, random: Random) -> list[Prompt]:
    """Return prompts of 20 to 600 words that share no prefix."""
    return [
        Prompt(
            " ".join([f"Prompt {number}:", *random.choices(WORDS, k=random.choice((20, 150, 600)))]),
            random.choice((40, 100, 250)),
        )
        for number in range(count)
    ]


async def stream(client: httpx.AsyncClient, prompt: Prompt, record: Stream, now_s: Callable[[], float]) -> None:
    """Stream one answer into `record`; a failure becomes its error."""
    body = {
        "model": "tiny",
        "prompt": prompt.text,
        "max_tokens": prompt.output_tokens,
        "temperature": 0,
        "stream": True,
    }
    try:
        async with client.stream(
            "POST", "/v1/completions", json=body, headers={"x-request-id": record.name}
        ) as response:
            if response.status_code != 200:
                record.error = f"{response.status_code}: {(await response.aread()).decode(errors='replace')}"
                return
            finish = None
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    if finish != "length":
                        record.error = f"the answer ended with the reason {finish}"
                    return
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        record.error = f"in mid-stream: {event['error']}"
                        return
                    (choice,) = event["choices"]
                    record.hear(choice["text"], now_s())
                    finish = choice["finish_reason"] or finish
            record.error = "the stream ended without [DONE]"
    except asyncio.CancelledError:
        record.error = "it did not end"
        raise
    except httpx.HTTPError as error:
        record.error = f"{type(error).__name__}: {error}"
    finally:
        record.ended_s = now_s()


async def record_undisturbed(client: httpx.AsyncClient, prompts: Sequence[Prompt]) -> dict[Prompt, str]:
    """Return the answer to each prompt. Raises AssertionError if one fails without a fault."""
    loop = asyncio.get_running_loop()
    limit = asyncio.Semaphore(4)

    async def ask(number: int, prompt: Prompt) -> str:
        async with limit:
            record = Stream(name=f"undisturbed-{number}", began_s=loop.time())
            await stream(client, prompt, record, loop.time)
        assert not record.error, f"an undisturbed request failed: {record.error}"
        return record.text

    answers = await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts)))
    return dict(zip(prompts, answers, strict=True))


async def stream_until(
    stopped: asyncio.Event,
    client: httpx.AsyncClient,
    answers: Mapping[Prompt, str],
    records: list[Stream],
    *,
    name: str,
    random: Random,
    now_s: Callable[[], float],
) -> None:
    """Stream one answer after another and append each record to `records`, until `stopped` is set."""
    prompts = list(answers)
    number = 0
    while not stopped.is_set():
        prompt = random.choice(prompts)
        record = Stream(name=f"{name}-{number}", began_s=now_s())
        try:
            await stream(client, prompt, record, now_s)
        finally:
            records.append(record)
        whole = answers[prompt]
        record.wrong = not whole.startswith(record.text) if record.error else record.text != whole
        number += 1
        if record.error:
            # Without this pause a gateway that refuses at once would get thousands of requests.
            await asyncio.sleep(0.2)
