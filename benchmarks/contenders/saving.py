"""The job that every contender of `gtp-jax bench checkpoint` takes, and how it reports. Needs only Python.

Each is a script of its own that takes a `Job` as JSON, so that anyone can run it by itself. It reports each thing done
at once, so that a contender killed for taking too long has reported what it did.
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
        variant: of the contender.
        directory: for the files; empty, and removed by the caller.
        rounds: after a first one.
        model: of which parameters and AdamW's moments are saved, fields of `LlamaConfig`.
        shapes: of these float32 arrays.
        platform: `gpu` or `cpu`.
    """

    variant: str
    directory: str
    rounds: int
    model: dict[str, Any]
    shapes: list[list[int]]
    platform: str


def job() -> Job:
    """Returns the job that was given."""
    return Job(**json.loads(sys.argv[1]))


def tell(**facts: Any) -> None:
    """Reports seconds by what was done, and facts."""
    print(MARK + json.dumps(facts), flush=True)


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def seconds(self) -> float:
        """Returns the seconds until now."""
        return time.perf_counter() - self._begin
