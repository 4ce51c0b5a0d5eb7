"""A bound on the places of a grammar or pattern at which an answer can be at once. Pure.

xgrammar computes its masks in the engine's step, for all these places. Optional parts in a row add up: each can be left
out, so the next character can be at any of them. Alternatives are not added up, since their cost is in proportion.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

PLACES_MAX: Final = 16
"""Bound on the places at once, written out over all rules, for one way through them.

Optional classes of letters in a row are the worst known (decision 0034).
"""
WORK_MAX: Final = 8 * PLACES_MAX**3
"""Bound on the sum of these places' cubes over all sequences, since an answer can be on several ways at once."""
PASSES_MAX: Final = 6
"""Passes over rules that refer to one another in circles. In JSON's grammar nothing changes in the third."""


class Part(NamedTuple):
    """A part of a sequence."""

    rule: str | None = None
    """None: a literal."""
    optional: bool = False
    repeated: bool = False

    def times(self, mark: str, counts: str) -> Part:
        """Return the part with a quantifier: a mark, or the counts within braces."""
        # A count of more digits than nine is as good as one of nine.
        numbers = [int(digits[:9]) for digits in re.findall(r"\d+", counts)] or [1]
        if mark:
            numbers = [int(mark == "+"), 1 + (mark != "?")]
        elif counts.strip().endswith(","):
            numbers.append(2)
        elif counts.strip().startswith(","):
            numbers.append(0)
        return Part(self.rule, self.optional or not min(numbers), self.repeated or max(numbers) > 1)


Rules = Mapping[str, Sequence[Sequence[Part]]]
"""The alternatives of each rule, and of each bracket: sequences."""


class Parser:
    """Collects the sequences of one rule, whose brackets become rules with a number for a name."""

    def __init__(self, rules: dict[str, list[list[Part]]]) -> None:
        self._rules = rules
        self._open: list[list[list[Part]]] = []

    def begin(self, rule: str) -> None:
        # Several definitions of a rule are alternatives.
        self._open = [self._rules.setdefault(rule, [])]
        self.alternative()

    def alternative(self) -> None:
        self._open[-1].append([])

    def add(self, part: Part) -> None:
        self._open[-1][-1].append(part)

    def open(self) -> None:
        self._open.append([])
        self.alternative()

    def close(self) -> None:
        if len(self._open) > 1:
            name = str(len(self._rules))
            self._rules[name] = self._open.pop()
            self.add(Part(name))

    def quantify(self, mark: str, counts: str) -> None:
        if sequence := self._open[-1][-1]:
            sequence[-1] = sequence[-1].times(mark, counts)

    def end(self) -> None:
        """Close the brackets that are open."""
        while len(self._open) > 1:
            self.close()


class _Reach(NamedTuple):
    """Where the next character can be, at the beginning and at the end of what matches a rule."""

    optional: bool
    """Whether nothing matches, too."""
    first: int
    """Places at its beginning."""
    last: int
    """Places within it that remain where it can end."""


_ONE: Final = _Reach(optional=False, first=1, last=0)
"""The reach of a literal, and of a rule of which nothing is known yet."""


def crowds_places(rules: Rules) -> bool:
    """Return whether an answer can be at more places at once than `PLACES_MAX` and `WORK_MAX` allow."""
    order, known = _inner_first(rules), dict[str | None, _Reach]()
    for _ in range(PASSES_MAX):
        work, changes = 0, False
        for name in order:
            before = reach = known.get(name, _ONE)
            for sequence in rules[name]:
                found, places = _reach(sequence, known)
                work += places**3 if places > 1 else 0
                if places > PLACES_MAX or work > WORK_MAX:
                    return True
                reach = _Reach(
                    reach.optional or found.optional, max(reach.first, found.first), max(reach.last, found.last)
                )
            known[name] = reach
            changes = changes or reach != before
        if not changes:
            return False
    return True


def _reach(sequence: Sequence[Part], known: Mapping[str | None, _Reach]) -> tuple[_Reach, int]:
    """Return the reach of a sequence, and the most places at which the next character can be within it."""
    optional, ahead, last, most = True, 0, 0, 0
    for part in reversed(sequence):
        inner = known.get(part.rule, _ONE)
        stays = inner.last + (inner.first if part.repeated else 0)
        most = max(most, stays + ahead)
        if optional:
            last = max(last, stays + ahead)
        left_out = part.optional or inner.optional
        ahead = inner.first + (ahead if left_out else 0)
        optional = optional and left_out
    return _Reach(optional, ahead, last), max(most, ahead)


def _inner_first(rules: Rules) -> list[str]:
    """Return the names of rules, each after those that it refers to, but for circles."""
    order, seen = list[str](), set[str]()
    for start in rules:
        pending: list[tuple[str, Iterator[str]]] = [] if start in seen else [(start, _inner(rules[start]))]
        seen.add(start)
        while pending:
            name, inner = pending[-1]
            following = next((each for each in inner if each in rules and each not in seen), None)
            if following is None:
                order.append(name)
                pending.pop()
            else:
                seen.add(following)
                pending.append((following, _inner(rules[following])))
    return order


def _inner(sequences: Sequence[Sequence[Part]]) -> Iterator[str]:
    return (part.rule for sequence in sequences for part in sequence if part.rule is not None)
