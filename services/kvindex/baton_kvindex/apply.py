"""Applies one message of a worker's events to the index, the journal and the speculative blocks. Pure."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from baton.errors import MalformedMessage
from baton.messages.index import BlocksCleared, BlocksRemoved, BlocksStored, KvEvents, Tier
from baton_kvindex.cold import Cold
from baton_kvindex.counters import Counters, ResyncReason
from baton_kvindex.durable import Journal
from baton_kvindex.index import ID_BYTES, Index, IndexFull, UnknownParent
from baton_kvindex.speculation import Speculation

EVENTS_BYTES_MAX: Final = 1 << 20
"""Most bytes of block ids in one message of events: four times what a worker puts into one."""


class PartlyCold(Exception):  # Not an error, as `Cold` is none.
    """Part of a message needs cold blocks; the part before `rest` is applied and must not be applied again."""

    def __init__(self, cold: Cold, rest: KvEvents) -> None:
        super().__init__(str(cold))
        self.cold = cold
        self.rest = rest


def apply_events(
    message: KvEvents, index: Index, journal: Journal, speculation: Speculation, counters: Counters
) -> ResyncReason | None:
    """Apply a message; return the reason for a resync of the worker, if part of the message was invalid.

    Raises PartlyCold with the part that is to be applied later.
    """
    worker, events = message.worker, message.events
    reason: ResyncReason | None = None
    if sum(len(event.blocks) for event in events if not isinstance(event, BlocksCleared)) > EVENTS_BYTES_MAX:
        counters.oversized += 1
        reason, events = ResyncReason.OVERSIZED, ()
    for at, event in enumerate(events):
        try:
            match event:
                case BlocksStored(parent=parent, blocks=blocks, tier=tier):
                    index.store(worker, parent, blocks, tier)
                    journal.store(worker, parent, blocks, tier)
                    if tier is Tier.DEVICE:
                        speculation.on_stored(worker, blocks)
                case BlocksRemoved(blocks=blocks, tier=tier):
                    counters.unknown_blocks += len(blocks) // ID_BYTES - index.remove(worker, blocks, tier)
                    journal.remove(worker, blocks, tier)
                    if tier is Tier.DEVICE:
                        speculation.on_removed(worker, blocks)
                case BlocksCleared(tier=tier):
                    if tier is None:
                        index.clear(worker)
                    else:
                        index.load(worker, (), tier)
                    if tier in (None, Tier.DEVICE):
                        speculation.drop(worker)
                    journal.rewrite(worker)
        except Cold as cold:
            if reason is None:
                raise PartlyCold(cold, structs.replace(message, events=events[at:])) from None
            break  # The resync replaces all that the worker holds.
        except UnknownParent:
            reason = reason or ResyncReason.UNKNOWN_PARENT
        except MalformedMessage:
            counters.malformed += 1
            reason = reason or ResyncReason.MALFORMED
        except IndexFull:
            counters.full += 1
            reason = reason or ResyncReason.FULL
    counters.applied += 1
    return reason
