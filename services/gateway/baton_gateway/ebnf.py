"""Bounds on the work that a grammar in EBNF can cause in an engine's step. Pure.

xgrammar compiles counted repetitions quickly, and computes its masks in the step: each repetition within another
multiplies the places at which the answer can be. Without a count there is one place more, whatever is around it;
`places` bounds how these add up.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import reduce
from typing import Final

from baton_gateway.places import Parser, Part, characters, crowds_places, one_of

REPETITIONS_MAX: Final = 1000
"""Bound on the product of counts within one another, over all rules; a single count is as high as it likes.

Three counts of 20 within one another, 8,000, took about 1 s a step with 8,000 tokens (decision 0034).
"""
_TOKEN: Final = re.compile(
    r"""\#[^\n]* | (?P<literal>"(?:\\.|[^"\\\n])*(?:"|\n|$) | \[(?:\\.|[^\]\\])*(?:\]|$))
    | (?P<rule>[A-Za-z_][\w.-]*)\s*::= | (?P<name>[A-Za-z_][\w.-]*)
    | \{(?P<counts>[\d\s,]*)\} | (?P<bracket>[()]) | (?P<mark>[?*+|])""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_CHARACTER: Final = re.compile(r"\\(?:x[\da-fA-F]{2}|u[\da-fA-F]{4}|U[\da-fA-F]{8}|.)|.", re.DOTALL)
"""A character within quotation marks."""
_LITERAL: Final = ""


def multiplies_repetitions(grammar: str) -> bool:
    """Return whether counts of repetitions within one another multiply to more than `REPETITIONS_MAX`.

    A rule that is within a counted repetition of itself multiplies without end.
    """
    rules = _rules(grammar)
    around = dict.fromkeys(rules, 1)
    pending = set(rules)
    while pending:
        rule = pending.pop()
        for name, counted in rules[rule].items():
            product = around[rule] * counted
            if product > REPETITIONS_MAX:
                return True
            if product > around.get(name, product):
                around[name] = product
                pending.add(name)
    return False


def is_crowded(grammar: str) -> bool:
    """Return whether an answer could be at too many places of the grammar at once."""
    rules = dict[str, list[list[Part]]]()
    parser = Parser(rules)
    for found in _TOKEN.finditer(grammar):
        if found["rule"] is not None:
            parser.end()
            parser.begin(found["rule"])
        elif not rules:
            continue
        elif found["bracket"] == "(":
            parser.open()
        elif found["bracket"] == ")":
            parser.close()
        elif found["mark"] == "|":
            parser.alternative()
        elif found["mark"] or found["counts"] is not None:
            parser.quantify(found["mark"] or "", found["counts"] or "")
        elif found["name"] is not None:
            parser.add(Part(found["name"]))
        elif found["literal"] not in (None, '""'):
            parser.add(_literal(found["literal"]))
    parser.end()
    return crowds_places(rules)


def _literal(text: str) -> Part:
    if text.startswith("["):
        return one_of(text)
    atoms = _CHARACTER.findall(text.removeprefix('"').removesuffix('"'))
    found = [characters(atom if len(atom) > 1 else re.escape(atom)) for atom in (*atoms[:1], *set(atoms), *atoms[-1:])]
    begins, *_, ends = found or (0, 0)
    return Part(begins=begins, characters=reduce(int.__or__, found, 0), ends=ends, length=len(atoms))


def _rules(grammar: str) -> Mapping[str, Mapping[str, int]]:
    """Return the names within each rule, and the highest product of counts around each; literals have no name."""
    rules: defaultdict[str, dict[str, int]] = defaultdict(dict)
    groups, last = [dict[str, int]()], dict[str, int]()
    for found in _TOKEN.finditer(grammar):
        if (rule := found["rule"]) is not None:
            groups, last = [rules[rule]], {}
        elif found["bracket"] == "(":
            groups.append({})
            last = {}
        elif found["bracket"] == ")":
            if len(groups) > 1:
                last = groups.pop()
                _merge(groups[-1], last)
        elif (counts := found["counts"]) is not None:
            last = {name: min(product * _highest(counts), REPETITIONS_MAX + 1) for name, product in last.items()}
            _merge(groups[-1], last)
        elif found["literal"] is not None or found["name"] is not None:
            last = {found["name"] or _LITERAL: 1}
            _merge(groups[-1], last)
    return rules


def _merge(into: dict[str, int], more: Mapping[str, int]) -> None:
    for name, product in more.items():
        into[name] = max(product, into.get(name, 0))


def _highest(counts: str) -> int:
    """Return the highest count of a repetition, as `3`, `3,` or `1,3`; more digits than nine are too many anyway."""
    return min(max([1, *(int(digits[:9]) for digits in re.findall(r"\d+", counts))]), REPETITIONS_MAX)
