"""In-memory snapshots of the training state, taken as often as is possible at little cost."""

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

# The fraction of the time that snapshots may take, unless an interval is given.
COST = 0.02

# The cadence until a snapshot has been measured.
_FIRST_CADENCE = 10
# The number of first steps of a process that are not representative and hence not measured.
_WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Cadence:
    """When snapshots are taken and by when they must be committed, so that a failure costs at most `most_lost` steps.

    Attributes:
        every: the number of steps between two snapshots.
        committed_after: the number of steps after which training waits for the commit, which runs in the background.
    """

    every: int
    committed_after: int

    @property
    def most_lost(self) -> int:
        """The maximum number of steps between the last committed snapshot and a failure."""
        return self.every + self.committed_after

    @classmethod
    def of_interval(cls, steps: int) -> Cadence:
        """Returns the cadence with which a failure costs at most `steps` steps."""
        return cls(-(-steps // 2), steps // 2)

    @classmethod
    def of_cost(cls, *, step_s: float, blocked_s: float, written_s: float) -> Cadence:
        """Returns the shortest cadence that blocks training for at most `COST` of the time and never waits for commits.

        Args:
            step_s: the seconds per step.
            blocked_s: the seconds for which a snapshot blocks training.
            written_s: the seconds until a snapshot is committed.
        """
        steps = max(math.ceil(blocked_s / (COST * step_s)), math.ceil(written_s / step_s), 1)
        return cls(steps, steps)


class Snapshots:
    """Takes the snapshots of a run in one process of its fleet. All processes must make the same calls.

    A snapshot is a checkpoint on an in-memory file system. Each process writes its own shards once. The step appears
    under its name when all processes have written; the previous snapshot is freed after that. Values and files have
    checksums, and a snapshot can be restored on any mesh.

    Args:
        directory: the in-memory directory of the snapshots.
        interval: the most steps that a failure may cost; `None` to choose by the measured cost of snapshots.
        cadence: the cadence that an earlier fleet chose, or `None`.
        report: called with the cadence and the measurements it is based on, whenever a cadence is chosen.
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
        self._begin: tuple[int, float] | None = None  # step and time at the end of the warm-up
        self._paused_s = 0.0
        self._next: int | None = None
        self._pending: tuple[int, float] | None = None
        self._written_s: float | None = None

    def source(self, checkpoints: Checkpoints, state_like: Any) -> Checkpoints:
        """Returns these snapshots if the latest one is at least as late as the latest checkpoint, otherwise the
        checkpoints.

        Args:
            checkpoints: the checkpoints of the run.
            state_like: the shapes, dtypes and shardings of the state.

        Raises:
            ValueError: if there is no room for snapshots of such a state.
        """
        sizes = [math.prod(leaf.shape) * np.dtype(_plain(leaf.dtype)).itemsize for leaf in jax.tree.leaves(state_like)]
        latest, on_disk = self._checkpoints.latest(), checkpoints.latest()
        if latest is None:  # otherwise the check passed when the first snapshot was taken
            check_room(self._directory.parent, sum(sizes))
        return checkpoints if latest is None or (on_disk or 0) > latest else self._checkpoints

    def stepped(self, step: int, state: Any, save: Callable[[Checkpoints], bool]) -> None:
        """Takes a snapshot if one is due, and waits for the last one if it must be committed by now.

        Args:
            step: the number of updates made so far.
            state: the train state after these updates.
            save: writes the state and returns whether it did.

        Raises:
            RuntimeError: if a snapshot was not committed although its save has ended.
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
            RuntimeError: if its save has ended without a commit.
        """
        self._checkpoints.wait()
        self._note_commit()
        if self._pending is not None:  # training on would only increase the number of steps at risk
            raise RuntimeError(
                f"the snapshot of step {self._pending[0]} was not committed in {self._directory}, although its save "
                "ended without an error; the supervisor continues from the previous snapshot."
            )

    def close(self) -> None:
        """Waits for pending saves and stops the background threads."""
        self._checkpoints.close()

    def _take(self, step: int, state: Any, save: Callable[[Checkpoints], bool]) -> None:
        self.wait()
        jax.block_until_ready(state)  # so that the time measured below is the snapshot's alone
        step_s = self._step_s(step)
        if not state_is_finite(state):
            return  # the next step's loss will not be finite either, which ends the run
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
        """Chooses the cadence from the slowest process's times, so that it is the same in all processes."""
        every = of_all_processes(np.array([step_s, blocked_s, written_s]))
        step_s, blocked_s, written_s = every.max(axis=0).tolist()
        self._cadence = Cadence.of_cost(step_s=step_s, blocked_s=blocked_s, written_s=written_s)
        self._next = step + self._cadence.every
        measured = {"step_s": step_s, "blocked_s": blocked_s, "written_s": written_s}
        self._report({**dataclasses.asdict(self._cadence), **measured})

    def _step_s(self, step: int) -> float | None:
        """Returns the mean seconds per step since the warm-up, excluding snapshots; `None` if unknown."""
        if self._begin is None or step <= self._begin[0]:
            return None
        first, begin = self._begin
        return max(1e-9, (time.monotonic() - begin - self._paused_s) / (step - first))

    def _note_commit(self) -> None:
        if self._pending is not None and self._checkpoints.latest() == self._pending[0]:
            self._written_s = time.monotonic() - self._pending[1]
            self._pending = None


def _plain(dtype: jax.typing.DTypeLike) -> Any:
    """Returns the dtype in which an array is stored; random keys are stored as uint32 words."""
    return np.uint32 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtype
