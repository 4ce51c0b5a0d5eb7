"""Clients of the published port, as users write them: OpenAI's SDK, many at the same time."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from openai import OpenAI

REQUEST_TIMEOUT_S = 120.0


def stream(client: OpenAI, prompt: str, *, tokens: int) -> Generator[str]:
    """Yield the parts of a greedy answer of exactly `tokens` tokens. Raises RuntimeError if it ends otherwise."""
    chunks = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    finish = None
    for chunk in chunks:
        for choice in chunk.choices:
            yield choice.text
            finish = choice.finish_reason or finish
    if finish != "length":
        raise RuntimeError(f"the stream ended with finish_reason {finish!r}")


def connect(url: str, *, retries: int = 0) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=retries, timeout=REQUEST_TIMEOUT_S)


@dataclass
class Load:
    """Streams that run one after the other on several threads until they are told to stop."""

    client: OpenAI
    tokens: int
    expected: str
    parts: int = 0
    done: int = 0
    wrong: list[str] = field(default_factory=list[str])
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, prompt: str) -> None:
        for number in count():
            if self.stop.is_set():
                return
            wrong = ""
            parts: list[str] = []
            try:
                for part in stream(self.client, prompt, tokens=self.tokens):
                    parts.append(part)
                    self.parts += 1
            except Exception as error:  # noqa: BLE001 - whatever a client gets to see is what this records.
                wrong = f"stream {number} after {len(parts)} parts: {error!r}"
            if not wrong and "".join(parts) != self.expected:
                wrong = f"stream {number} has another text than an undisturbed one"
            with self.lock:
                self.done += not wrong
                self.wrong += [wrong] if wrong else []


@contextmanager
def under_load(client: OpenAI, prompt: str, *, tokens: int, threads: int) -> Generator[Load]:
    """Keep `threads` streams of the same greedy request running, each compared with an undisturbed one."""
    load = Load(client, tokens, "".join(stream(client, prompt, tokens=tokens)))
    workers = [threading.Thread(target=load.run, args=(prompt,)) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield load
    finally:
        load.stop.set()
        for worker in workers:
            worker.join(REQUEST_TIMEOUT_S)
