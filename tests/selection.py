"""Which cases of a large table of tests run by default; the others are marked slow."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def diagonal(*parameters: Iterable[Any], every: int = 1) -> list[Any]:
    """Returns every combination of values, for `pytest.mark.parametrize` of as many names.

    By default run as few as contain every value of every parameter: the first values together, the second ones, and so
    on, where a shorter list begins again. With `every`, only the first of these combinations and each so many after it.
    """
    lists = [list(values) for values in parameters]
    usual = {tuple(i % len(values) for values in lists) for i in range(0, max(map(len, lists)), every)}
    places: list[tuple[int, ...]] = [()]
    for values in lists:
        places = [(*place, i) for place in places for i in range(len(values))]
    return [
        pytest.param(*(values[i] for values, i in zip(lists, place, strict=True)), marks=_marks(place in usual))
        for place in places
    ]


def others_slow(cases: Iterable[Any], usual: Collection[Any]) -> Sequence[Any]:
    """Returns all cases, single values or tuples of several; by default run the `usual` ones, which must be among
    them."""
    cases = list(cases)
    assert all(case in cases for case in usual), f"{usual} are not all among {cases}"
    spread = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*one, marks=_marks(case in usual)) for case, one in zip(cases, spread, strict=True)]


def every(step: int, cases: Iterable[Any]) -> Sequence[Any]:
    """Returns all cases, single values or tuples of several; by default run the first and each `step`th after it."""
    cases = list(cases)
    return others_slow(cases, cases[::step])


def _marks(usual: bool) -> list[pytest.MarkDecorator]:
    return [] if usual else [pytest.mark.slow]
