"""The error tree: its drawing, its codes, and its way across the bus."""

from __future__ import annotations

import re

import pytest

from baton import errors
from baton.errors import BatonError, Overloaded, error_from_code
from baton.messages.base import ErrorReport


def _tree(root: type[BatonError], depth: int = 0) -> list[tuple[int, str, int]]:
    # A service may have errors of its own, which never leave it; the tree is what stands in `baton.errors`.
    children = [child for child in root.__subclasses__() if child.__module__ == errors.__name__]
    below = [line for child in children for line in _tree(child, depth + 1)]
    return [(depth, root.__name__, root.http_status), *below]


ALL = [getattr(errors, name) for _, name, _ in _tree(BatonError)]


def test_the_drawing_shows_every_class_where_it_stands_with_its_status() -> None:
    drawn: list[tuple[int, str, int]] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"^([│├└─ ]*)([A-Z]\w+)\s+(\d{3})\b", line):
            drawn.append((len(found[1]) // 4, found[2], int(found[3])))
    assert drawn == _tree(BatonError)[1:]


def test_codes_are_unique_names() -> None:
    codes = [kind.code for kind in ALL]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z_]+", code) for code in codes)


@pytest.mark.parametrize("kind", ALL)
def test_an_error_crosses_the_bus_as_itself(kind: type[BatonError]) -> None:
    report = ErrorReport.of(kind("a sentence", retry_after_s=1.5))
    again = report.to_error()
    assert type(again) is kind
    assert (str(again), again.detail, again.retry_after_s) == ("a sentence", "a sentence", 1.5)


def test_a_code_of_a_newer_version_is_a_plain_failure() -> None:
    error = error_from_code("from_the_future", "what", retry_after_s=2.0)
    assert type(error) is BatonError
    assert error.http_status == 500
    assert error.retry_after_s == 2.0


def test_what_may_be_retried_says_when() -> None:
    assert Overloaded("full", retry_after_s=0.5).retry_after_s == 0.5
    assert Overloaded("full").retry_after_s is None
