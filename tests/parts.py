"""`pytest --part 3/8`: the third of eight parts of the chosen tests, whole files, about as many cases in each.

`pytest --within 300` starts no test later than after 300 seconds, and reports the others as skipped.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter

import pytest


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", type=part, help="run part K of N: whole files, as many cases in each")
    parser.addoption("--within", metavar="SECONDS", type=float, help="start no test later than after so many seconds")


STARTED = time.monotonic()  # by every worker, within seconds of the others


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.getoption("--within")
    if limit is not None and time.monotonic() - STARTED > limit:
        pytest.skip(f"was not started within {limit:g} s")


def part(text: str) -> tuple[int, int]:
    """Returns K and N of K/N.

    Raises:
        argparse.ArgumentTypeError: if it is no part.
    """
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise argparse.ArgumentTypeError(f"{text!r} must be K/N with whole numbers, 1 <= K <= N, such as 3/8")
    return int(numbers[1]), int(numbers[2])


def files_of_part(cases: Counter[str], part: int, parts: int) -> set[str]:
    """Returns the files of a part, counted from 1: each file, the largest first, goes where the fewest cases are."""
    sizes = [0] * parts
    taken: list[set[str]] = [set() for _ in range(parts)]
    for file, count in sorted(cases.items(), key=lambda one: (-one[1], one[0])):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += count
        taken[smallest].add(file)
    return taken[part - 1]


@pytest.hookimpl(trylast=True)  # after tests are selected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (chosen := config.getoption("--part")) is None:
        return
    files = [item.nodeid.partition("::")[0] for item in items]
    kept = files_of_part(Counter(files), *chosen)
    config.hook.pytest_deselected(items=[item for item, file in zip(items, files, strict=True) if file not in kept])
    items[:] = [item for item, file in zip(items, files, strict=True) if file in kept]
