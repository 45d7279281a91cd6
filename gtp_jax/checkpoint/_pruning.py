"""Deletes the steps that the retention policy drops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from etils import epath

from ._steps import steps_in

# orbax's names: of what is half-written, and of the mark of a finished directory, where renames are not atomic.
_HALF_WRITTEN = ".orbax-checkpoint-tmp"
COMMITTED = "commit_success.txt"


def nothing_guards() -> None:
    """Lets everything be published and deleted."""


class Pruning:
    """Deletes steps so that one killed halfway is no step: first it loses its name, then its files. Never the latest.

    orbax deletes a step where it stands, and what a kill leaves would still be listed, and kept if it was of a low
    loss. Under its new name it is swept as half-written steps are.

    Args:
        directory: of all steps.
        guard: called before each; raises if nothing may be deleted.
    """

    def __init__(self, directory: str, guard: Callable[[], None]) -> None:
        self._directory, self._guard = directory, guard

    def delete(self, step: int) -> None:
        """Deletes a step, in the first process; not the latest one, whose successor has not been committed then."""
        paths = steps_in(self._directory)
        if step not in paths or step == max(paths) or jax.process_index() != 0:
            return
        path = paths[step]
        self._guard()
        if "://" in self._directory:
            (path / COMMITTED).unlink(missing_ok=True)
        else:
            path = path.rename(epath.Path(f"{path}{_HALF_WRITTEN}"))
        path.rmtree()

    def delete_steps(self, steps: Sequence[int]) -> None:
        """Deletes steps, one after the other."""
        for step in steps:
            self.delete(step)

    def close(self) -> None:
        """Does nothing: nothing is left to do."""
