"""A bound on the places of a grammar or pattern at which an answer can be at once. Pure.

xgrammar computes its masks in the engine's step, for all these places. Optional parts in a row add up: each can be left
out, so the next character can be at any of them. A counted repetition is such a row, too, where the text does not say
how often it was repeated: `([a-z]{1,9}){0,9}`, but not `([a-z]{1,9},){0,9}`. Alternatives are not added up, since their
cost is in proportion.

Where a high count may vary, xgrammar follows all repetitions that an answer may have made so far. What it follows grows
with the answer if a token can be parts of several: `([a-z][a-z]){0,1000}`, but not `([a-z],){0,1000}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

PLACES_MAX: Final = 16
"""Bound on the places at once, written out over all rules, for one way through them.

Optional classes of letters in a row are the worst known (decision 0034).
"""
WORK_MAX: Final = 8 * PLACES_MAX**3
"""Bound on the sum of these places' cubes over all sequences, since an answer can be on several ways at once."""
CROWDED: Final = (
    f"at most {PLACES_MAX} optional or repeated parts in a row, and few such rows; a counted repetition is such a row, "
    "too, unless each part ends with what the next cannot begin with: put a separator between the parts, or leave the "
    "count out"
)
"""What the author of a grammar or pattern beyond these bounds is told."""
PASSES_MAX: Final = 6
"""Passes over rules that refer to one another in circles. In JSON's grammar nothing changes in the third."""
COUNTED_MAX: Final = 1 << 20
WRITTEN_OUT_MAX: Final = 128
"""The most repetitions that xgrammar writes out as rules (`kUnzipThreshold` in its `grammar_functor.cc`)."""
ATOM_MAX: Final = 256
ANY_CHARACTER: Final = (1 << 257) - 1
"""Characters as a set of bits: the first 256, and one bit for all others."""
_OTHERS: Final = 1 << 256
_KNOWN: Final = "".join(map(chr, range(256)))
_SET_OPERATION: Final = re.compile(r"^\[.*(?<!\\)(?:\[|--|&&|~~|\|\|)", re.DOTALL)
"""A class with what Python's `re` warns of, since other dialects take it for a set within a set."""


class Part(NamedTuple):
    """A part of a sequence."""

    rule: str | None = None
    """None: a literal."""
    optional: bool = False
    repeated: bool = False
    varies: bool = False
    """Whether it may be repeated more or less often."""
    counted: int = 1
    """The most repetitions that are counted, or `COUNTED_MAX`."""
    begins: int = ANY_CHARACTER
    """Characters that a literal can begin with, as bits."""
    characters: int = ANY_CHARACTER
    """All characters of a literal, as bits."""
    ends: int = ANY_CHARACTER
    """Characters that a literal can end with."""
    length: int = 1
    """Length of a literal, in characters."""

    def times(self, mark: str, counts: str) -> Part:
        """Return the part with a quantifier: a mark, or the counts within braces."""
        # A count of more digits than nine is as good as one of nine.
        numbers = [int(digits[:9]) for digits in re.findall(r"\d+", counts)] or [1]
        counted = max(1, *numbers)
        if mark:
            numbers = [int(mark == "+"), 1 + (mark != "?")]
        elif counts.strip().endswith(","):
            numbers.append(2)
        elif counts.strip().startswith(","):
            numbers.append(0)
        return self._replace(
            optional=self.optional or not min(numbers),
            repeated=self.repeated or max(numbers) > 1,
            varies=self.varies or counts.strip().endswith(",") or min(numbers) < max(numbers),
            counted=min(self.counted * counted, COUNTED_MAX),
        )


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
    begins: int
    """Characters that it can begin with, as bits."""
    goes_on: int
    """Characters that a longer match can have where a shorter one ends."""
    characters: int
    """All its characters."""
    ends: int
    """Characters that it can end with."""
    length: int | None
    """Length in characters; None where that varies."""

    @property
    def joins(self) -> bool:
        """Whether the text of several, one after the other, does not say how many they are."""
        return self.optional or bool(self.goes_on & self.begins)

    def at_once(self, part: Part) -> int:
        """Return how many repetitions an answer can be in at once; `part`: how often it is repeated."""
        high = part.varies and part.counted > WRITTEN_OUT_MAX and self.length != 1
        return part.counted if self.joins or (high and self.ends & self.begins) else 1

    def or_else(self, other: _Reach) -> _Reach:
        """Return the reach of both alternatives."""
        all_characters = self.characters | other.characters
        same = self.length is not None and self.length == other.length
        apart = same or not self.begins & other.begins
        return _Reach(
            optional=self.optional or other.optional,
            first=max(self.first, other.first),
            last=max(self.last, other.last),
            begins=self.begins | other.begins,
            goes_on=self.goes_on | other.goes_on | (0 if apart else all_characters),
            characters=all_characters,
            ends=self.ends | other.ends,
            length=self.length if same else None,
        )


_UNKNOWN: Final = _Reach(optional=False, first=1, last=0, begins=0, goes_on=0, characters=0, ends=0, length=1)
"""The reach of a rule of which nothing is known yet."""


def _reach_of(part: Part, known: Mapping[str, _Reach]) -> _Reach:
    """Return the reach of a part without its repetitions."""
    if part.rule is not None:
        return known.get(part.rule, _UNKNOWN)
    return _literal_reach(part.begins, part.characters, part.ends, part.length)


@lru_cache(maxsize=4096)
def _literal_reach(begins: int, characters: int, ends: int, length: int) -> _Reach:
    return _UNKNOWN._replace(begins=begins, characters=characters, ends=ends, length=length)


def one_of(atom: str) -> Part:
    """Return the part that an atom of a pattern, or a class of a grammar, is."""
    found = characters(atom)
    return Part(begins=found, characters=found, ends=found)


def characters(atom: str) -> int:
    """Return the characters that an atom of a pattern or a class of a grammar matches, as bits; all if in doubt."""
    # What is long is in doubt, too: it would be kept.
    doubtful = len(atom) > ATOM_MAX or not atom.isascii() or _SET_OPERATION.search(atom)
    return ANY_CHARACTER if doubtful else _characters(atom)


@lru_cache(maxsize=4096)
def _characters(atom: str) -> int:
    try:
        found = re.findall(atom, _KNOWN, re.DOTALL | re.ASCII)
    except (re.error, OverflowError):
        return ANY_CHARACTER
    others = _OTHERS if re.search(r"\\[uUNpPDWS]|^\[\^|^\.$", atom) else 0
    return sum(1 << ord(each) for each in found if len(each) == 1) | others


def crowds_places(rules: Rules) -> bool:
    """Return whether an answer can be at more places at once than `PLACES_MAX` and `WORK_MAX` allow."""
    order, known = _inner_first(rules), dict[str, _Reach]()
    for _ in range(PASSES_MAX):
        work, changes = 0, False
        for name in order:
            reach = None
            for sequence in rules[name]:
                found, places = _reach(sequence, known)
                work += places**3 if places > 1 else 0
                if places > PLACES_MAX or work > WORK_MAX:
                    return True
                reach = found if reach is None else reach.or_else(found)
            changes = changes or reach != known.get(name)
            known[name] = reach or _UNKNOWN
        if not changes:
            return False
    return True


def _reach(sequence: Sequence[Part], known: Mapping[str, _Reach]) -> tuple[_Reach, int]:
    """Return the reach of a sequence, and the most places at which the next character can be within it."""
    optional, ahead, last, most, begins, ends = True, 0, 0, 0, 0, 0
    inners = [_reach_of(part, known) for part in sequence]
    for part, inner in zip(reversed(sequence), reversed(inners), strict=True):
        stays = inner.at_once(part) * (inner.last + (inner.first if part.repeated else 0))
        most = max(most, stays + ahead)
        if optional:
            last = max(last, stays + ahead)
            ends |= inner.ends
        left_out = part.optional or inner.optional
        ahead = inner.first + (ahead if left_out else 0)
        begins = inner.begins | (begins if left_out else 0)
        optional = optional and left_out
    goes_on, characters = 0, 0
    length: int | None = 0
    for part, inner in zip(sequence, inners, strict=True):
        characters |= inner.characters
        # Where what came before goes on with what begins this part, either may be meant to the end of it.
        behind = characters if goes_on & inner.begins else 0
        if part.optional or inner.optional:
            behind |= goes_on | inner.begins
        goes_on = behind | inner.goes_on | (inner.begins if part.varies else 0)
        if part.repeated and inner.joins:
            goes_on |= inner.characters
        if length is None or inner.length is None or part.varies:
            length = None
        else:
            length = min(length + inner.length * part.counted, COUNTED_MAX)
    return _Reach(optional, ahead, last, begins, goes_on, characters, ends, length), max(most, ahead)


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
