"""Defines the job of each contender of `gtp-jax bench checkpoint`, and how contenders report. Needs only Python.

Each contender is a script that takes a `Job` as JSON, so that anyone can run it on its own. It reports each result
immediately, so that results are not lost if it is ended because it takes too long.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

from workload import MARK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """States to save and restore.

    Attributes:
        variant: the variant of the contender.
        directory: an empty directory for the files; the caller removes it.
        rounds: the number of rounds after the first one.
        model: the fields of the `LlamaConfig` of the model whose parameters and AdamW moments are saved.
        shapes: the shapes of these float32 arrays.
        platform: `gpu` or `cpu`.
    """

    variant: str
    directory: str
    rounds: int
    model: dict[str, Any]
    shapes: list[list[int]]
    platform: str


def job() -> Job:
    """Returns the job on the command line."""
    return Job(**json.loads(sys.argv[1]))


def tell(**facts: Any) -> None:
    """Reports durations in seconds and other facts, by name."""
    print(MARK + json.dumps(facts), flush=True)


class Clock:
    """Measures the seconds since it was created."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def seconds(self) -> float:
        """Returns the seconds so far."""
        return time.perf_counter() - self._begin
