"""Assembly of prompts too long for one message: keeps leading chunks until the task brings the tail."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.errors import MalformedMessage
from baton.messages.attempts import TokenChunk
from baton.messages.base import TOKEN_BYTES
from baton.worker.attempt import Key


@dataclass(slots=True)
class _Incomplete:
    until_s: float
    packed: bytearray = field(default_factory=bytearray)


class Assembly:
    """Incomplete prompts, bounded in number, bytes and time; the oldest is dropped first. Pure."""

    def __init__(self, *, prompts_max: int = 256, bytes_max: int = 64 << 20, wait_s: float = 5.0) -> None:
        self._prompts_max = prompts_max
        self._bytes_max = bytes_max
        self._wait_s = wait_s
        self._prompts: dict[Key, _Incomplete] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, chunk: TokenChunk, now_s: float) -> None:
        """Append a chunk; a repeated one is ignored.

        A chunk that leaves a gap drops the prompt, and its task will be answered `incomplete`.
        """
        key = (chunk.context.request, chunk.context.attempt)
        prompt = self._prompts.get(key)
        held = len(prompt.packed) if prompt else 0
        start = chunk.offset * TOKEN_BYTES
        if start + len(chunk.tokens) <= held:
            return
        if len(chunk.tokens) % TOKEN_BYTES or start != held:
            self.drop(key)
            return
        if prompt is None:
            prompt = self._prompts[key] = _Incomplete(now_s + self._wait_s)
        prompt.packed += chunk.tokens
        self._bytes += len(chunk.tokens)
        while len(self._prompts) > self._prompts_max or self._bytes > self._bytes_max:
            self.drop(next(iter(self._prompts)))

    def complete(self, key: Key, tail: bytes, prompt_tokens: int) -> bytes | None:
        """Return the whole packed prompt, or None where chunks are missing. Raises MalformedMessage for odd bytes."""
        if len(tail) % TOKEN_BYTES:
            raise MalformedMessage(f"{len(tail)} bytes are no whole number of packed token ids")
        prompt = self._prompts.get(key)
        whole = bytes(prompt.packed) + tail if prompt else tail
        self.drop(key)
        return whole if len(whole) == prompt_tokens * TOKEN_BYTES else None

    def purge(self, now_s: float) -> None:
        """Drop prompts whose task has not come. They are kept in the order of their deadlines."""
        while self._prompts:
            key, prompt = next(iter(self._prompts.items()))
            if prompt.until_s > now_s:
                return
            self.drop(key)

    def drop(self, key: Key) -> None:
        """Drop the chunks of an attempt, if there are any."""
        prompt = self._prompts.pop(key, None)
        self._bytes -= len(prompt.packed) if prompt else 0
