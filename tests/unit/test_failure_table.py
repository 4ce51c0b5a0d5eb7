"""The table of failures: complete, and the same in the docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from baton_gateway.failures import TABLE, Asking, Ending, asking, ending
from baton_gateway.resumption import Moved

from baton import errors
from baton.errors import BatonError, DeadlineExceeded, NoResponders, NoWorkers, Overloaded, PeerUnreachable

DOCUMENT = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()


def tree(root: type[BatonError] = BatonError) -> Iterator[type[BatonError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


def test_every_error_has_a_row() -> None:
    assert set(TABLE) == set(tree())


def test_the_docs_show_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", DOCUMENT, re.MULTILINE)
    assert rows == [(kind.__name__, row.asking, row.ending) for kind, row in TABLE.items()]


def test_the_docs_limit_every_response() -> None:
    limits = DOCUMENT.partition("## How often")[2].partition("## Workers")[0]
    assert [each for each in (*Asking, *Ending) if each not in limits] == []


@pytest.mark.parametrize("kind", list(TABLE))
@pytest.mark.parametrize("begun", [False, True])
def test_conditions_are_resolved(kind: type[BatonError], begun: bool) -> None:
    error = kind("why")
    assert asking(error, begun=begun, excludes=begun) in (Asking.FAIL, Asking.WAIT, Asking.LIFT)
    resolved = (Ending.FAIL, Ending.WORKER, Ending.PREFILL, Ending.PAIR, Ending.KIND, Ending.ROOM)
    assert ending(error, begun=begun, attempt_begun=begun, searching=begun) in resolved


def test_an_error_without_a_row_counts_as_the_one_above_it() -> None:
    assert ending(Moved("x"), begun=False, attempt_begun=False, searching=False) is Ending.WORKER


def test_what_the_answer_has_reached_decides() -> None:
    def after(error: BatonError, *, begun: bool = False, attempt_begun: bool = False, searching: bool = True) -> Ending:
        return ending(error, begun=begun, attempt_begun=attempt_begun, searching=searching)

    assert after(DeadlineExceeded("late")) is Ending.FAIL
    assert after(DeadlineExceeded("late"), begun=True) is Ending.WORKER
    assert after(Overloaded("full"), begun=True) is Ending.ROOM
    assert after(Overloaded("full"), begun=True, attempt_begun=True) is Ending.WORKER
    assert after(NoResponders("restarting")) is Ending.ROOM
    assert after(NoResponders("restarting"), searching=False) is Ending.WORKER
    assert after(PeerUnreachable("cut")) is Ending.PAIR
    assert asking(Overloaded("full"), begun=False, excludes=True) is Asking.FAIL
    assert asking(Overloaded("full"), begun=True, excludes=False) is Asking.WAIT
    assert asking(NoWorkers("all failed"), begun=False, excludes=True) is Asking.LIFT
    assert asking(NoWorkers("all died"), begun=False, excludes=False) is Asking.WAIT
