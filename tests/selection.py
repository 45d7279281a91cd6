"""Which cases of a table of tests there are, and which of them run by default; the others are marked full."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def pairwise(*parameters: Iterable[Any], usual: int | None = None) -> list[Any]:
    """Returns combinations of values that contain every pair of values of any two parameters, for `parametrize`.

    The first ones contain every value of every parameter: the first values together, the second ones, and so on, where
    a shorter list begins again. Those run by default; the others are marked full. The result is always the same.

    Args:
        parameters: the values of each; two parameters or more.
        usual: how many combinations run by default, in place of as many as contain every value.
    """
    lists = [list(values) for values in parameters]
    sizes = [len(values) for values in lists]
    rows = [tuple(i % size for size in sizes) for i in range(max(sizes))]
    usual = len(rows) if usual is None else usual
    left = {pair for row in itertools.product(*map(range, sizes)) for pair in _pairs(row)}
    left -= {pair for row in rows for pair in _pairs(row)}
    while left:
        rows.append(max(itertools.product(*map(range, sizes)), key=lambda row: len(left & _pairs(row))))
        left -= _pairs(rows[-1])
    return [
        pytest.param(*(values[i] for values, i in zip(lists, row, strict=True)), marks=_marks(number < usual))
        for number, row in enumerate(rows)
    ]


def _pairs(row: Sequence[int]) -> set[tuple[tuple[int, int], ...]]:
    """Returns the pairs of a combination, each value with the number of its parameter."""
    return set(itertools.combinations(enumerate(row), 2))


def others_full(cases: Iterable[Any], usual: Collection[Any]) -> Sequence[Any]:
    """Returns all cases, single values or tuples of several; by default run the `usual` ones, which must be among
    them."""
    cases = list(cases)
    assert all(case in cases for case in usual), f"{usual} are not all among {cases}"
    spread = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*one, marks=_marks(case in usual)) for case, one in zip(cases, spread, strict=True)]


def every(step: int, cases: Iterable[Any]) -> Sequence[Any]:
    """Returns all cases, single values or tuples of several; by default run the first and each `step`th after it."""
    cases = list(cases)
    return others_full(cases, cases[::step])


def _marks(usual: bool) -> list[pytest.MarkDecorator]:
    return [] if usual else [pytest.mark.full]
