"""Applies one message of a worker's events to the index, and tells whoever must know."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from baton.errors import MalformedMessage
from baton.messages import BlocksCleared, BlocksRemoved, BlocksStored, KvEvents
from baton_kvindex.cold import Cold
from baton_kvindex.counters import Counters
from baton_kvindex.durable import Journal
from baton_kvindex.index import ID_BYTES, Index, IndexFull, UnknownParent
from baton_kvindex.speculation import Speculation

EVENTS_BYTES_MAX: Final = 1 << 20
"""Ids of blocks in one message of events: four times what a worker puts into one."""


class PartlyCold(Exception):  # Not an error, as `Cold` is none.
    """A part of a message needs what is cold; what came before is applied, and is not to be applied again."""

    def __init__(self, cold: Cold, rest: KvEvents) -> None:
        super().__init__(str(cold))
        self.cold = cold
        self.rest = rest


def apply_events(
    message: KvEvents, index: Index, journal: Journal, speculation: Speculation, counters: Counters
) -> bool:
    """Apply a message; return whether all of it made sense. Raises PartlyCold, with what is to be applied later."""
    worker, events = message.worker, message.events
    understood = True
    if sum(len(event.blocks) for event in events if not isinstance(event, BlocksCleared)) > EVENTS_BYTES_MAX:
        counters.oversized += 1
        understood, events = False, ()
    for at, event in enumerate(events):
        try:
            match event:
                case BlocksStored(parent=parent, blocks=blocks):
                    index.store(worker, parent, blocks)
                    journal.store(worker, parent, blocks)
                    speculation.on_stored(worker, blocks)
                case BlocksRemoved(blocks=blocks):
                    counters.unknown_blocks += len(blocks) // ID_BYTES - index.remove(worker, blocks)
                    journal.remove(worker, blocks)
                    speculation.on_removed(worker, blocks)
                case BlocksCleared():
                    index.clear(worker)
                    speculation.drop(worker)
                    journal.rewrite(worker)
        except Cold as cold:
            if understood:
                raise PartlyCold(cold, structs.replace(message, events=events[at:])) from None
            break  # All of the worker is read anew.
        except UnknownParent:
            counters.unknown_parents += 1
            understood = False
        except MalformedMessage:
            counters.malformed += 1
            understood = False
        except IndexFull:
            counters.full += 1
            understood = False
    counters.applied += 1
    return understood
