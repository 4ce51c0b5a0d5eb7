"""Grammars in EBNF: counts of repetitions within one another are bounded, over all rules."""

from __future__ import annotations

from itertools import count

import pytest
from baton_gateway.ebnf import REPETITIONS_MAX, is_crowded, multiplies_repetitions
from baton_gateway.places import PLACES_MAX, WRITTEN_OUT_MAX
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.limits import ProcessorTime

MODERATE = [
    'root ::= "a"{0,1000000}',
    "root ::= [a-z]{1000000}",
    'root ::= "a"{10,} "b"{0,900} ("c"{30}){33}',
    'root ::= (((("a"*)+)*)?)*',
    'root ::= "[" (root ("," root)*)? "]"',
    'root ::= row{0,30}\nrow ::= cell{0,30} "\\n"\ncell ::= [0-9]+',
    'root ::= "({99}){99}" [({99})]{99} # ((x{99}){99}){99}',
]
EXPLOSIVE = [
    'root ::= (("a"{0,100}){0,100}){0,100}',
    'root ::= ("a"{1,1000000}){2}',
    'root ::= "a"{32}{32}',
    "root ::= [}]{32} ([]{99}]{32}){32}",
    'root ::= x{0,100}\nx ::= y{0,100}\ny ::= "a"',
    'y ::= "a"{0,100}\nx ::= y\nroot ::= x{0,100}',
    'root ::= "a" | "b" (root "c"){0,2}',
    f'root ::= ("a"{{{"9" * 5000}}}){{{"9" * 5000}}}',
    "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}{{0,8}}\n" for i in range(8)) + 'r8 ::= "a"',
]


@pytest.mark.parametrize("grammar", MODERATE)
def test_a_moderate_grammar_passes(grammar: str) -> None:
    assert not multiplies_repetitions(grammar)


@pytest.mark.parametrize("grammar", EXPLOSIVE, ids=range(len(EXPLOSIVE)))
def test_a_grammar_that_could_hold_an_engine_up_is_found(grammar: str) -> None:
    assert multiplies_repetitions(grammar)


LETTERS = '"a"? ' * PLACES_MAX
FEWER = '"a"? ' * (PLACES_MAX // 2)
ROOMY = [
    """root ::= ws value ws
    value ::= object | array | string | number | ("true" | "false" | "null") ws
    object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
    array ::= "[" ws (value ("," ws value)*)? "]" ws
    string ::= "\\"" ([^"\\] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\\"" ws
    number ::= ("-"? ([0-9] | [1-9] [0-9]*)) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
    ws ::= ([ \\t\\n] ws)?""",
    f"root ::= {LETTERS}",
    f'root ::= {FEWER} "b" {FEWER} | {FEWER} # "a"?',
    'root ::= "[" list? "]"\nlist ::= list "," item | item\nitem ::= [a-z]{1,1000000}',
    'root ::= "a" | "b" | "c" root?',
    "root ::= " + " | ".join(f'"a"? "{number}"' for number in range(4096)),
    # A row of counted parts, of which each says where it ends or where the next begins.
    'root ::= ([a-z]{1,10} " "){0,100}',
    'root ::= ("\\n" [^\\n]{1,10}){0,100}',
    'root ::= ([a-z]+ [a-z0-9]* ","){0,1000}',
    'root ::= ("\\"" [^"\\\\]* "\\"" ","?){0,100}',
    'root ::= "[" number ("," number){0,999} "]"\nnumber ::= "-"? ([0-9] | [1-9] [0-9]*) ("." [0-9]+)?',
    'root ::= ("true" | "false" | "yes"){0,1000} [a-z]{5}{40}',
    "root ::= ([a-z]{5}{5}){40}",
    f"root ::= ([a-z]{{1,10}}){{0,{PLACES_MAX // 2}}}",
    f"root ::= ([a-z]?){{0,{PLACES_MAX}}}",
    "root ::= (([a-z]+)*)*",
    # High counts that do not vary, of one character, or of parts that end with what they do not begin with.
    f"root ::= ([a-z] [0-9]?){{0,{WRITTEN_OUT_MAX}}} ([a-z] [a-z]){{1000}} ([a-z] [a-z]){{2,}}",
    "root ::= x{0,1000} [a-z]{1000,}\nx ::= [a-z] | [0-9]",
    'root ::= ([a-z] [0-9]){0,1000} ("ab" | "c d"){0,1000}',
]
CROWDED = [
    f'root ::= {LETTERS} "a"',
    f'root ::= {LETTERS} ("" | "b") "a"*',
    f"root ::= x{{0,1}} {LETTERS}\nx ::= [a-z]",
    f'root ::= x y\nx ::= "b" {LETTERS}\ny ::= "a"*',
    'root ::= z9\nz0 ::= "a"\n' + "".join(f"z{i + 1} ::= z{i} w\n" for i in range(9)) + 'w ::= "b"? "c"*',
    "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(5)) + 'r5 ::= "a"?',
    'r5 ::= "a"? | "b" r0\n' + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(5)) + "root ::= r0",
    "root ::= " + " | ".join(f"{LETTERS}" for _ in range(20)),
    'root ::= root root | "a"?',
    # A row of counted parts, of which nobody can say how many they are.
    f"root ::= ([a-z]{{1,10}}){{0,{PLACES_MAX // 2 + 1}}}",
    f"root ::= ([a-z]?){{0,{PLACES_MAX + 1}}}",
    "root ::= ([a-z]{1,10}){100}",
    "root ::= ([a-z]{1,3} [a-z]){0,100}",
    "root ::= ([a-z] [a-z]?){0,100}",
    "root ::= ([a-z] | [a-c] [a-z]){0,100}",
    "root ::= ([a-z] [a-z0-9]* [0-9]?){0,100}",
    'root ::= x{0,100}\nx ::= y\ny ::= z{1,10}\nz ::= [a-z] | "b" [a-z]',
    'root ::= (" "? [a-z]{1,10}){0,100}',
    "root ::= ([\\u4e00-\\u9fff]{1,10}){0,100}",
    # High counts that vary, of parts without separators.
    f"root ::= ([a-z] [0-9]?){{0,{WRITTEN_OUT_MAX + 1}}}",
    "root ::= ([a-z] [a-z]){1000,}",
    'root ::= x{1,1000}\nx ::= y | "ab"\ny ::= [b-z]{2}',
    'root ::= ("aba" ","?){0,1000}',
]


@pytest.mark.parametrize("grammar", ROOMY, ids=range(len(ROOMY)))
def test_a_grammar_with_few_places_at_once_passes(grammar: str) -> None:
    assert not is_crowded(grammar)


@pytest.mark.parametrize("grammar", CROWDED, ids=range(len(CROWDED)))
def test_a_grammar_with_many_places_at_once_is_found(grammar: str) -> None:
    assert is_crowded(grammar)


Part = tuple[str, int, list["Part"]]
"""What a part is, its count, and the parts inside."""


def parts(depth: int) -> st.SearchStrategy[Part]:
    inner = st.lists(parts(depth - 1), min_size=1, max_size=3) if depth else st.just(list[Part]())
    return st.tuples(st.sampled_from(["sequence", "choice", "rule"]), st.integers(1, 40), inner)


def highest(part: Part) -> int:
    _, times, inner = part
    return times * max(map(highest, inner), default=1)


def written(part: Part, rules: list[str], numbers: count[int]) -> str:
    """Return a part as EBNF, whose rules are appended."""
    kind, times, inner = part
    between = " | " if kind == "choice" else " "
    text = between.join(written(each, rules, numbers) for each in inner) or '"a{9}("'
    if kind == "rule":
        name = f"x{next(numbers)}"
        rules.append(f"{name} ::= {text}")
        text = name
    return f"({text}){{0,{times}}}" if times > 1 else f"({text})"


@given(parts(3))
def test_the_product_is_that_of_the_grammar_written_out(part: Part) -> None:
    rules: list[str] = []
    rules.append(f"root ::= {written(part, rules, count())}")
    assert multiplies_repetitions("\n".join(rules)) is (highest(part) > REPETITIONS_MAX)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "' + "a" * 250_000,
        "root ::= " + "(" * 120_000 + ")" * 120_000,
        "root ::= " + "[" * 250_000,
        "root ::= " + "a{1}" * 60_000,
        "".join(f"x{number} ::= x{number + 1}{{1}} x{number - 1}\n" for number in range(8000)),
        "x ::= " + " ".join(f"x{number}" for number in range(30_000)),
    ],
    ids=["text", "brackets", "classes", "counts", "rules", "names"],
)
def test_the_check_of_a_long_grammar_is_quick(grammar: str) -> None:
    with ProcessorTime() as work:
        multiplies_repetitions(grammar)
        if "((" not in grammar:  # The depth of brackets is bounded before.
            is_crowded(grammar)
    assert work.taken_s < 2.0
