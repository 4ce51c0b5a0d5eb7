"""Stores of the answers to requests with an `Idempotency-Key`: in Redis, and in memory.

PREFIX:1:once:NAME    hash    digest, claim, and once it is there, answer; it expires
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from baton.clock import Clock
from baton.redis import RedisConnection

LEASE_S: Final = 10.0
"""Time after which a claim that is not renewed ends."""
VERSION: Final = 1

_CLAIM: Final = """
local digest, answer, claim = unpack(redis.call('HMGET', KEYS[1], 'digest', 'answer', 'claim'))
if not digest then
  redis.call('HSET', KEYS[1], 'digest', ARGV[1], 'claim', ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return {'claimed'}
end
if digest ~= ARGV[1] then return {'other'} end
if answer then return {'answer', answer} end
if claim == ARGV[2] then return {'claimed'} end
return {'running'}
"""

_IF_CLAIMED: Final = """
local claim, answer = unpack(redis.call('HMGET', KEYS[1], 'claim', 'answer'))
if claim ~= ARGV[1] or answer then return 0 end
"""
_RENEW: Final = _IF_CLAIMED + "return redis.call('PEXPIRE', KEYS[1], ARGV[2])"
_RELEASE: Final = _IF_CLAIMED + "return redis.call('DEL', KEYS[1])"
_KEEP: Final = (
    _IF_CLAIMED
    + """
redis.call('HSET', KEYS[1], 'answer', ARGV[3])
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
)


@dataclass(frozen=True, slots=True)
class Claimed:
    """The key is the caller's: it makes the answer."""


@dataclass(frozen=True, slots=True)
class Running:
    """The answer is being made for another request."""


class AnswerStore(Protocol):
    """All methods raise StoreUnavailable; those after `claim` change nothing unless the claim holds."""

    async def claim(self, name: str, digest: str, claim: str) -> Claimed | Running | bytes | None:
        """Return the answer, or claim the name if it is free; None: it stands for another digest.

        To repeat a call changes nothing: the client of Redis does so where the connection breaks before the answer.
        """
        ...

    async def renew(self, name: str, claim: str) -> None: ...

    async def keep(self, name: str, claim: str, answer: bytes) -> None: ...

    async def release(self, name: str, claim: str) -> None: ...


class RedisAnswers:
    def __init__(self, connection: RedisConnection, *, prefix: str, ttl_s: float, lease_s: float = LEASE_S) -> None:
        self._redis = connection.client
        self._answer = connection.answer
        self._root = f"{prefix}:{VERSION}:once:"
        self._ttl_ms = round(ttl_s * 1000)
        self._lease_ms = round(lease_s * 1000)

    async def claim(self, name: str, digest: str, claim: str) -> Claimed | Running | bytes | None:
        found, *answer = await self._run(_CLAIM, name, digest, claim, self._lease_ms)
        if found == b"answer":
            return bytes(answer[0])
        return {b"claimed": Claimed(), b"running": Running()}.get(found)

    async def renew(self, name: str, claim: str) -> None:
        await self._run(_RENEW, name, claim, self._lease_ms)

    async def keep(self, name: str, claim: str, answer: bytes) -> None:
        await self._run(_KEEP, name, claim, self._ttl_ms, answer)

    async def release(self, name: str, claim: str) -> None:
        await self._run(_RELEASE, name, claim)

    async def _run(self, script: str, name: str, *arguments: str | bytes | int) -> list[bytes]:
        asked = self._redis.eval(script, 1, self._root + name, *arguments)
        return await self._answer(asked, said="the store of idempotency keys cannot be reached")


@dataclass(slots=True)
class _Entry:
    digest: str
    claim: str
    expires_at_s: float
    answer: bytes | None = None


class MemoryAnswers:
    """Store in this process, for tests and simulators."""

    def __init__(self, clock: Clock, *, ttl_s: float, lease_s: float = LEASE_S) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._lease_s = lease_s
        self._entries: dict[str, _Entry] = {}

    async def claim(self, name: str, digest: str, claim: str) -> Claimed | Running | bytes | None:
        entry, now_s = self._entries.get(name), self._clock.now_s()
        if entry is None or entry.expires_at_s <= now_s:
            self._entries[name] = _Entry(digest, claim, now_s + self._lease_s)
            return Claimed()
        if entry.digest != digest:
            return None
        return entry.answer or (Claimed() if entry.claim == claim else Running())

    async def renew(self, name: str, claim: str) -> None:
        if (entry := self._claimed(name, claim)) is not None:
            entry.expires_at_s = self._clock.now_s() + self._lease_s

    async def keep(self, name: str, claim: str, answer: bytes) -> None:
        if (entry := self._claimed(name, claim)) is not None:
            entry.answer, entry.expires_at_s = answer, self._clock.now_s() + self._ttl_s

    async def release(self, name: str, claim: str) -> None:
        if self._claimed(name, claim) is not None:
            del self._entries[name]

    def _claimed(self, name: str, claim: str) -> _Entry | None:
        entry = self._entries.get(name)
        if entry is None or entry.claim != claim or entry.answer or entry.expires_at_s <= self._clock.now_s():
            return None
        return entry
