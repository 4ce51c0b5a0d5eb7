"""The worker's ledger: admission of attempts, their reservations, and their ends.

Pure: the clock's values are passed in. States, and what each holds (protocol: `docs/handoff.md`):

    WAITING     nothing
        ▼ begin, join
    RESERVED ──enter──▶ QUEUED | PULLING ──advance──▶ RUNNING ──end──▶ RETAINED ──▶ gone     decode
        │   slot, blocks                 slot, blocks          tokens only
        └─────enter──▶ COMPUTING ──hold──▶ HELD ──settle──▶ gone                             prefill
            slot, blocks, lease        blocks, lease

WAITING is an attempt that may wait for room, in order of arrival. Its legs on two workers are reserved on both or on
neither: the worker that has room first reserves (`begin`) and asks the other one, which reserves and starts (`join`) or
refuses; then the first one starts (`joined`) or waits again, holding nothing (`fall_back`).

QUEUED is an aggregated attempt before its first token, PULLING a disaggregated one: engines report
nothing finer. `stop` ends an attempt in any state. Inside the engine it only marks the attempt, which
keeps its reservation until the engine has released it (`end`) or failed to for too long (`sweep`).
The deadline limits the time to the first token, the progress limit the time to each further one. Each
key leaves a tombstone that outlives both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf
from typing import Final

from baton.engines.engine import EngineDelta, Leg
from baton.errors import AttemptFailed, BatonError, DeadlineExceeded, EngineFailed, Overloaded
from baton.messages.attempts import AttemptState, DigestEntry, Finish, FinishReason
from baton.messages.base import ErrorReport
from baton.node.membership import Membership
from baton.worker.attempt import IN_ENGINE, WITH_SLOT, Ask, Attempt, Key, Limits, Refusal, Stopped
from baton.worker.kv_book import Holding
from baton.worker.room import Room
from baton.worker.tombstones import Tombstones

JOIN_TIMEOUT_S: Final = 0.5
"""Longest time for which a leg stays reserved while the worker of the other leg is asked."""
JOIN_PAUSE_S: Final = 0.05
"""Time after a refused join in which the leg lets others go first."""

_ENTERED: Final = {
    Leg.WHOLE: AttemptState.QUEUED,
    Leg.DECODE: AttemptState.PULLING,
    Leg.PREFILL: AttemptState.COMPUTING,
}


class Ledger:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.draining = False
        self.room = Room(limits)
        self.output_tokens = 0
        self.ends = Counter[str]()
        """Ended attempts by finish reason, `held`, or the code of an error."""
        self._attempts: dict[Key, Attempt] = {}
        self._tombstones = Tombstones(limits.tombstones_max)
        self._retained_tokens = 0
        self._gateways = Membership[None](lost_after_s=limits.lost_after_s)

    # ------------------------------------------------------------ reading

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._attempts.values())

    def get(self, key: Key) -> Attempt | None:
        return self._attempts.get(key)

    @property
    def waiting_blocks(self) -> int:
        """Blocks that waiting attempts lack."""
        return sum(self.room.blocks_lacking(attempt) for attempt in self.waiting)

    def prompts_queued(self) -> Iterator[Attempt]:
        """Return the attempts whose prompts are accepted and not yet computed, the oldest first."""
        uncomputed = (AttemptState.WAITING, AttemptState.RESERVED, AttemptState.QUEUED, AttemptState.COMPUTING)
        return (a for a in self if a.leg is not Leg.DECODE and a.state in uncomputed)

    @property
    def prefill_tokens_queued(self) -> int:
        """Prompt tokens accepted and not yet computed, without those expected in the cache."""
        return sum(a.uncached_tokens for a in self.prompts_queued())

    @property
    def waiting(self) -> list[Attempt]:
        """Attempts that wait for room, in order of arrival."""
        return [attempt for attempt in self if attempt.state is AttemptState.WAITING]

    def digests(self) -> dict[str, tuple[DigestEntry, ...]]:
        """Return the attempts held for each live gateway; an empty list is reported, too."""
        entries: dict[str, list[DigestEntry]] = {gateway: [] for gateway in self._gateways}
        for attempt in self:
            request, number = attempt.key
            entry = DigestEntry(request=request, attempt=number, emitted=len(attempt.tokens), state=attempt.state)
            entries.setdefault(attempt.gateway, []).append(entry)
        return {gateway: tuple(held) for gateway, held in entries.items()}

    # ------------------------------------------------------------ admission

    def reserve(self, ask: Ask, now_s: float) -> Attempt | Refusal:
        """Reserve for an attempt, have it wait if it may, or say why not.

        The caller looks up live keys with `get` first.
        """
        assert ask.key not in self._attempts, "a live attempt is reserved twice"
        request, number = ask.key
        if not ask.budget_s > 0:
            return Refusal("expired", "the attempt's deadline has passed")
        self._tombstones.purge(now_s)
        if self._tombstones.refuses(request, number):
            return Refusal("tombstone", "this attempt was cancelled or ended here, or a newer one was seen")
        if self.draining:
            return Refusal("draining", "the worker takes no new attempts: it leaves, or changes its role")
        blocks = self.room.blocks_of(ask)
        kv, lease = Holding(blocks, ask.prefix), Holding(blocks, ask.prefix)
        if refusal := self._no_place(blocks, ask.leg) if ask.wait_s > 0 else self.room.lack(kv, ask.leg):
            return refusal
        self.hear_gateway(ask.gateway, now_s)
        deadline_s = now_s + min(ask.budget_s, self.limits.budget_s_max)
        attempt = Attempt(
            key=ask.key,
            gateway=ask.gateway,
            leg=ask.leg,
            prompt_tokens=ask.prompt_tokens,
            uncached_tokens=ask.prompt_tokens - ask.cached_tokens,
            kv=kv,
            lease=lease,
            deadline_s=deadline_s,
            give_up_s=deadline_s,
            state=AttemptState.WAITING,
            partner=ask.partner,
            wait_until_s=now_s + min(ask.wait_s, self.limits.wait_s_max),
        )
        self._attempts[ask.key] = attempt
        self._bury(request, number - 1, deadline_s)
        if not ask.wait_s > 0:
            self._take_room(attempt, now_s + self.limits.enter_timeout_s)
        return attempt

    def _take_room(self, attempt: Attempt, until_s: float) -> None:
        attempt.state, attempt.state_until_s = AttemptState.RESERVED, until_s
        self.room.take(attempt)

    def _no_place(self, blocks: int, leg: Leg) -> Refusal | None:
        """Return why an attempt cannot wait here: too many do, or it would not fit even alone."""
        if len(self.waiting) >= self.limits.waiting_max:
            return Refusal("full", f"{self.limits.waiting_max} attempts wait already")
        return self.room.exceeded_by(blocks, leg)

    # ------------------------------------------------------------ waiting for room

    def begin(self, now_s: float) -> list[Attempt]:
        """Reserve for waiting attempts, first come, first served, and return those that now have room.

        An attempt with a `partner` is only reserved until `joined` or `fall_back`; the others may enter the engine.
        """
        begun: list[Attempt] = []
        for attempt in self.waiting:
            if attempt.offer_at_s > now_s:
                continue
            if self.room.lack(attempt.kv, attempt.leg):
                # Smaller attempts behind it must not take its room again and again.
                break
            attempt.joining = bool(attempt.partner)
            self._take_room(attempt, now_s + (JOIN_TIMEOUT_S if attempt.joining else self.limits.enter_timeout_s))
            begun.append(attempt)
        return begun

    def join(self, key: Key, now_s: float) -> Attempt | None:
        """Reserve because the other leg is reserved, and return the attempt; None where it cannot be.

        It must enter the engine unless it already did.
        """
        attempt = self._attempts.get(key)
        if attempt is None or attempt.stopping or attempt.state is AttemptState.RETAINED:
            return None
        if attempt.state is AttemptState.WAITING:
            if self.room.lack(attempt.kv, attempt.leg):
                return None
            self._take_room(attempt, inf)
        self._confirm(attempt, now_s)
        return attempt

    def joined(self, key: Key, now_s: float) -> bool:
        """Record that both legs are reserved; True if this one is to enter the engine now."""
        attempt = self._attempts.get(key)
        if attempt is None or not attempt.joining:
            return False
        self._confirm(attempt, now_s)
        return True

    def _confirm(self, attempt: Attempt, now_s: float) -> None:
        if attempt.state is AttemptState.RESERVED:
            attempt.joining, attempt.state_until_s = False, now_s + self.limits.enter_timeout_s

    def fall_back(self, key: Key, now_s: float) -> None:
        """Wait again, holding nothing: the other leg cannot be reserved."""
        attempt = self._attempts.get(key)
        if attempt is not None and attempt.joining:
            attempt.joining, attempt.state_until_s = False, inf
            attempt.offer_at_s = now_s + JOIN_PAUSE_S
            self._change(attempt, AttemptState.WAITING)

    # ------------------------------------------------------------ progress

    def enter(self, key: Key) -> bool:
        """Record that the attempt is handed to the engine now; False if it must not be any more."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.state is not AttemptState.RESERVED or attempt.joining:
            return False
        attempt.state = _ENTERED[attempt.leg]
        attempt.state_until_s = inf
        return True

    def advance(self, key: Key, delta: EngineDelta, now_s: float) -> int | None:
        """Record an engine step; return the index of its first token, None if the attempt is no longer wanted."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.state not in IN_ENGINE or attempt.stopping:
            return None
        attempt.cached_tokens = max(attempt.cached_tokens, delta.cached_tokens)
        attempt.promoted_tokens = max(attempt.promoted_tokens, delta.promoted_tokens)
        attempt.loaded_tokens = max(attempt.loaded_tokens, delta.loaded_tokens)
        attempt.transferred_tokens = max(attempt.transferred_tokens, delta.transferred_tokens)
        attempt.transferred_bytes = max(attempt.transferred_bytes, delta.transferred_bytes)
        index = len(attempt.tokens)
        if attempt.leg is Leg.PREFILL:
            return index
        attempt.state = AttemptState.RUNNING
        if delta.tokens:
            attempt.tokens.extend(delta.tokens)
            attempt.logprobs.extend(delta.logprobs)
            self.output_tokens += len(delta.tokens)
            if not index:
                self.room.settle(attempt)
            attempt.give_up_s = now_s + self.limits.progress_s
        return index

    def hold(self, key: Key) -> bool:
        """Record that prefill computed the prompt. False: the attempt was stopped meanwhile; end the lease."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.state is not AttemptState.COMPUTING:
            return False
        if attempt.stopping:
            self._forget(attempt)
            return False
        self.room.settle(attempt)
        self._change(attempt, AttemptState.HELD)
        self.ends["held"] += 1
        return True

    def settle(self, leased: frozenset[Key]) -> list[Attempt]:
        """Forget held attempts whose leases the engine no longer has; return them."""
        gone = [a for a in self if a.state is AttemptState.HELD and a.key not in leased]
        for attempt in gone:
            self._forget(attempt)
        return gone

    def end(self, key: Key, reason: FinishReason, error: BatonError | None, now_s: float) -> Attempt | None:
        """Record that the engine has released an attempt; return it the first time, None after that.

        An attempt whose gateway may still ask for it is RETAINED with its `finish`; others are forgotten at once.
        """
        attempt = self._attempts.get(key)
        if attempt is None or attempt.state not in WITH_SLOT | {AttemptState.WAITING}:
            return None
        if attempt.stopping:
            error = attempt.stop_error
            reason = FinishReason.ERROR if error else FinishReason.CANCELLED
        self.ends[error.code if error else reason] += 1
        attempt.finish = Finish(reason=reason, usage=attempt.usage(), error=ErrorReport.of(error) if error else None)
        if attempt.leg is Leg.PREFILL or (attempt.stopping and error is None):
            self._forget(attempt)
            return attempt
        self._change(attempt, AttemptState.RETAINED)
        # Ends are kept for long, and hold no blocks.
        attempt.kv.ids = attempt.lease.ids = ()
        self._bury(*attempt.key, max(attempt.deadline_s, attempt.give_up_s))
        attempt.state_until_s = now_s + self.limits.retain_s
        self._retained_tokens += len(attempt.tokens)
        self._bound_retained()
        return attempt

    # ------------------------------------------------------------ ends from outside

    def cancel(self, key: Key, budget_s: float, now_s: float) -> bool:
        """End an attempt that the gateway gave up, known or not; True if the engine must be told."""
        request, number = key
        # Not `max(0, …)` alone: a budget that is no number compares false and must not outlive the limit.
        lasts_s = min(budget_s, self.limits.budget_s_max) if budget_s > 0 else 0.0
        self._bury(request, number, now_s + lasts_s)
        attempt = self._attempts.get(key)
        return attempt is not None and self.stop(attempt, None, now_s)

    def acknowledge(self, key: Key, now_s: float) -> bool:
        """Forget an attempt whose end has arrived. Prefill's lease ends with it: True if the engine must be told."""
        attempt = self._attempts.get(key)
        return attempt is not None and self.stop(attempt, None, now_s)

    def stop(self, attempt: Attempt, error: BatonError | None, now_s: float) -> bool:
        """End an attempt in any state; True if the engine must be told.

        With an `error`, the end is kept for the gateway (`attempt.finish`, at once if the engine never
        had the attempt); without one, the attempt is forgotten.
        """
        match attempt.state:
            case AttemptState.WAITING | AttemptState.RESERVED:
                attempt.stopping, attempt.stop_error = True, error
                self.end(attempt.key, FinishReason.ERROR, error, now_s)
                return False
            case AttemptState.RETAINED:
                if error is None:
                    self._forget(attempt)
                return False
            case AttemptState.HELD:
                self._forget(attempt)
                return True
            case _:
                first = not attempt.stopping
                if first:
                    attempt.state_until_s = now_s + self.limits.abort_timeout_s
                if first or error is None:
                    attempt.stopping, attempt.stop_error = True, error
                return first

    def hear_gateway(self, gateway: str, now_s: float) -> None:
        """Record a gateway's beat. Gateways have one generation: a restarted one has another name."""
        self._gateways.hear(gateway, 0, None, now_s)

    def extend_deadlines(self, pause_s: float, now_s: float) -> None:
        """Extend the gateways' deadlines by a pause of this process, see `PauseDetector`."""
        self._gateways.extend_deadlines(pause_s, now_s)

    def sweep(self, now_s: float) -> list[Stopped]:
        """Stop all attempts whose time is up; call it several times a second."""
        self._tombstones.purge(now_s)
        self._gateways.expire(now_s)
        stopped: list[Stopped] = []
        for attempt in list(self):
            if attempt.stopping and attempt.state in IN_ENGINE:
                if attempt.state_until_s <= now_s:
                    stopped.append(self._overrule(attempt, now_s))
            elif attempt.gateway not in self._gateways:
                stopped.append(Stopped(attempt, self.stop(attempt, None, now_s)))
            elif attempt.state is AttemptState.RETAINED:
                if attempt.state_until_s <= now_s:
                    self._forget(attempt)
            elif attempt.give_up_s <= now_s:
                stopped.append(Stopped(attempt, self.stop(attempt, self._lateness(attempt), now_s)))
            elif attempt.state is AttemptState.WAITING and attempt.wait_until_s <= now_s:
                full = Overloaded("no room within the time for which the attempt may wait here")
                stopped.append(Stopped(attempt, self.stop(attempt, full, now_s)))
            elif attempt.joining and attempt.state_until_s <= now_s:
                self.fall_back(attempt.key, now_s)
            elif attempt.state is AttemptState.RESERVED and attempt.state_until_s <= now_s:
                stuck = AttemptFailed(f"the attempt did not enter the engine within {self.limits.enter_timeout_s:g} s")
                stopped.append(Stopped(attempt, self.stop(attempt, stuck, now_s)))
        return stopped

    # ------------------------------------------------------------ bookkeeping

    def _lateness(self, attempt: Attempt) -> BatonError:
        if attempt.tokens:
            return AttemptFailed(f"the engine gave no further token within {self.limits.progress_s:g} s")
        return DeadlineExceeded("the attempt's deadline passed on the worker")

    def _overrule(self, attempt: Attempt, now_s: float) -> Stopped:
        if attempt.stop_error is not None:
            attempt.stop_error = EngineFailed("the engine did not end an aborted attempt")
        self.end(attempt.key, FinishReason.ERROR, attempt.stop_error, now_s)
        return Stopped(attempt, tell_engine=False, overdue=True)

    def _change(self, attempt: Attempt, state: AttemptState) -> None:
        """Move to `state`, and release what the new state does not hold."""
        self.room.release(attempt, state)
        attempt.state = state

    def _forget(self, attempt: Attempt) -> None:
        del self._attempts[attempt.key]
        self.room.release(attempt, None)
        if attempt.state is AttemptState.RETAINED:
            self._retained_tokens -= len(attempt.tokens)
        self._bury(*attempt.key, max(attempt.deadline_s, attempt.give_up_s))

    def _bury(self, request: str, number: int, deadline_s: float) -> None:
        self._tombstones.bury(request, number, deadline_s + self.limits.progress_s)

    def _bound_retained(self) -> None:
        """Forget the oldest ends beyond the limit. The newest stays, whatever its size: its gateway waits for it."""
        retained: Sequence[Attempt] = ()
        if self._retained_tokens > self.limits.retained_tokens_max:
            retained = sorted((a for a in self if a.state is AttemptState.RETAINED), key=lambda a: a.state_until_s)
        for attempt in retained[:-1]:
            if self._retained_tokens <= self.limits.retained_tokens_max:
                break
            self._forget(attempt)
