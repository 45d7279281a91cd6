"""Deletes the steps that the retention policy drops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from etils import epath

from ._steps import steps_in

# orbax's suffix of directories that are being written, and its file that marks a directory as complete. Where renames
# are not atomic, the suffix is not used, and only the mark shows that a directory is complete.
_HALF_WRITTEN = ".orbax-checkpoint-tmp"
COMMITTED = "commit_success.txt"


class Pruning:
    """Deletes steps: renames them first, so that a step whose deletion is interrupted no longer counts as a step.

    orbax deletes a step in place. If it is killed halfway, the rest would still be listed, and kept if its loss is low.
    Under the new name, orbax removes the rest as it removes half-written steps. The latest step is never deleted.

    Args:
        directory: the directory of all steps.
        guard: called before each deletion; raises if nothing may be deleted.
    """

    def __init__(self, directory: str, guard: Callable[[], None]) -> None:
        self._directory, self._guard = directory, guard

    def delete(self, step: int) -> None:
        """Deletes a step, in the first process only. Keeps the latest step, because its successor is not committed."""
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
        """Deletes steps one after another."""
        for step in steps:
            self.delete(step)

    def close(self) -> None:
        """Does nothing; orbax calls it."""
