"""Snapshots of the training state in memory, taken so often that they cost little."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...checkpoint import Checkpoints
from ...mesh import of_all_processes
from ..trainer import state_is_finite
from ._memory import check_room

# What snapshots may take of the time, unless an interval is given.
COST = 0.02

# Until a snapshot has been measured.
_FIRST_CADENCE = 10
# The first steps of a process do what later ones need not.
_WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Cadence:
    """When snapshots are taken and when they must be committed, so that a failure costs at most `most_lost` steps.

    Attributes:
        every: steps between two snapshots.
        committed_after: steps after which training waits for the commit, which happens in the background.
    """

    every: int
    committed_after: int

    @property
    def most_lost(self) -> int:
        """Steps between the last commit and a failure, at most."""
        return self.every + self.committed_after

    @classmethod
    def of_interval(cls, steps: int) -> Cadence:
        """Returns the cadence with which at most so many steps are lost."""
        return cls(-(-steps // 2), steps // 2)

    @classmethod
    def of_cost(cls, *, step_s: float, blocked_s: float, written_s: float) -> Cadence:
        """Returns the shortest cadence at which training is blocked for `COST` of the time, and waits for no commit.

        Args:
            step_s: seconds of a step.
            blocked_s: seconds for which a snapshot blocks training.
            written_s: seconds after which it is committed.
        """
        steps = max(math.ceil(blocked_s / (COST * step_s)), math.ceil(written_s / step_s), 1)
        return cls(steps, steps)


class Snapshots:
    """The snapshots of a run, as one process of its fleet takes them. All processes make the same calls.

    A snapshot is a checkpoint on a file system in memory: each process writes its own shards, once; the step appears
    under its name when all have; the one before is freed after that; values and files have checksums; and any mesh
    restores it.

    Args:
        directory: in memory.
        interval: steps that a failure may cost at most; `None` to measure what snapshots cost.
        cadence: what an earlier fleet has measured.
        report: is told the cadence, with what was measured, whenever it is chosen.
    """

    def __init__(
        self, directory: Path, interval: int | None, cadence: Cadence | None, report: Callable[[dict[str, Any]], None]
    ) -> None:
        self._checkpoints = Checkpoints(directory, keep=1)
        self._directory = directory
        self._fixed = None if interval is None else Cadence.of_interval(interval)
        self._cadence = self._fixed or cadence or Cadence(_FIRST_CADENCE, _FIRST_CADENCE)
        self._report = report
        self._first: int | None = None
        self._begin: tuple[int, float] | None = None  # after warm-up: step and time
        self._paused_s = 0.0
        self._next: int | None = None
        self._pending: tuple[int, float] | None = None
        self._written_s: float | None = None

    def source(self, checkpoints: Checkpoints, state_like: Any) -> Checkpoints:
        """Returns these snapshots if there is one that is as late as the latest checkpoint, else the checkpoints.

        Args:
            checkpoints: of the run.
            state_like: shapes and shardings of the state.

        Raises:
            ValueError: if there is no room for snapshots of such a state.
        """
        sizes = [math.prod(leaf.shape) * np.dtype(_plain(leaf.dtype)).itemsize for leaf in jax.tree.leaves(state_like)]
        latest, on_disk = self._checkpoints.latest(), checkpoints.latest()
        if latest is None:  # the others have found room before
            check_room(self._directory.parent, sum(sizes))
        return checkpoints if latest is None or (on_disk or 0) > latest else self._checkpoints

    def stepped(self, step: int, state: Any, save: Callable[[Checkpoints], bool]) -> None:
        """Takes a snapshot if one is due, and waits for the last one if it must be committed by now.

        Args:
            step: updates made so far.
            state: the train state after them.
            save: writes the state, and returns whether it did.

        Raises:
            RuntimeError: if a snapshot has not been committed though its save has ended.
        """
        now = time.monotonic()
        if self._first is None or self._next is None:
            self._first = step
            self._next = step - 1 + self._cadence.every
        if self._begin is None and step >= self._first + _WARM_UP - 1:
            self._begin = step, now
        self._note_commit()
        if self._pending is not None and step >= self._pending[0] + self._cadence.committed_after:
            self.wait()
        if step >= self._next:
            self._take(step, state, save)
        if self._begin is not None:
            self._paused_s += time.monotonic() - now

    def wait(self) -> None:
        """Waits until the last snapshot is committed.

        Raises:
            RuntimeError: if its save has ended otherwise.
        """
        self._checkpoints.wait()
        self._note_commit()
        if self._pending is not None:  # without it, each further step would be one more to lose
            raise RuntimeError(
                f"the snapshot of step {self._pending[0]} has not been committed in {self._directory}, though its save "
                "has ended without an error; the supervisor goes on from the one before."
            )

    def close(self) -> None:
        """Waits, and frees the threads."""
        self._checkpoints.close()

    def _take(self, step: int, state: Any, save: Callable[[Checkpoints], bool]) -> None:
        self.wait()
        jax.block_until_ready(state)  # what is measured below is the snapshot's own time
        step_s = self._step_s(step)
        if not state_is_finite(state):
            return  # the loss of the next step will say so, and end the run
        begin = time.monotonic()
        if not save(self._checkpoints):
            return  # due again after the next step
        self._next = step + self._cadence.every
        blocked_s = time.monotonic() - begin
        self._pending = step, begin
        if self._cadence.committed_after == 0:
            self.wait()
        if self._fixed is None and step_s is not None and self._written_s is not None:
            self._choose(step, step_s, blocked_s, self._written_s)

    def _choose(self, step: int, step_s: float, blocked_s: float, written_s: float) -> None:
        """Chooses the cadence, the same in all processes: that of the slowest."""
        every = of_all_processes(np.array([step_s, blocked_s, written_s]))
        step_s, blocked_s, written_s = every.max(axis=0).tolist()
        self._cadence = Cadence.of_cost(step_s=step_s, blocked_s=blocked_s, written_s=written_s)
        self._next = step + self._cadence.every
        measured = {"step_s": step_s, "blocked_s": blocked_s, "written_s": written_s}
        self._report({**dataclasses.asdict(self._cadence), **measured})

    def _step_s(self, step: int) -> float | None:
        """Returns the mean seconds of a step since the warm-up, without snapshots; `None` if unknown."""
        if self._begin is None or step <= self._begin[0]:
            return None
        first, begin = self._begin
        return max(1e-9, (time.monotonic() - begin - self._paused_s) / (step - first))

    def _note_commit(self) -> None:
        if self._pending is not None and self._checkpoints.latest() == self._pending[0]:
            self._written_s = time.monotonic() - self._pending[1]
            self._pending = None


def _plain(dtype: jax.typing.DTypeLike) -> Any:
    """Returns the dtype of what is stored of an array: words, of random keys."""
    return np.uint32 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtype
