"""Finds the steps in a directory of checkpoints, and removes them without deleting them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp

from .._foreign import brief
from .._numbers import whole
from ..mesh import of_all_processes
from ._place import check_encodes, real_path

# The remedies when the system refuses to write: because the disk is full or a quota is exhausted; because a file has
# reached the limit of its size; because a file system or directory has become read-only; or because a disk fails.
_ROOM = "Make room, keep fewer steps (`keep`), or save to another directory"
_LARGER = "Raise the limit of a file's size (`ulimit -f`), or save to a file system that allows larger files"
_WRITABLE = "Make it writable again, or save to another directory"
_DISK = "Check the disk, or save to another directory"
_REMEDIES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: _LARGER,
    errno.EROFS: _WRITABLE,
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EIO: _DISK,
    errno.ESTALE: _DISK,
    errno.ENODEV: _DISK,
}

# The largest number of a step that can be saved. A folder may have a larger one as its name, such as a backup's.
MOST = np.iinfo(np.int64).max


def absolute(directory: str | os.PathLike[str], *, writable: bool) -> str:
    """Returns a directory's absolute path, or its URL.

    Raises:
        OSError: if `writable` is true and the directory cannot be written.
        ValueError: if `writable` is true and the path is not UTF-8.
    """
    name = os.fspath(directory)
    if "://" in name:
        return name
    path = real_path(name)
    if writable:
        check_encodes(path)
        _check_writable(path)
    return str(path)


def whole_step(step: Any, name: str = "step") -> int:
    """Returns the number of a step, or a number of steps.

    Args:
        step: a whole number of Python, NumPy or JAX.
        name: the name of the argument in the error message.

    Raises:
        TypeError: if `step` is anything else, including a bool or a float.
    """
    if (number := whole(step)) is not None:
        return number
    raise TypeError(
        f"`{name}` is {brief(step)}, a {type(step).__name__}; it must be a whole number: an int, or an integer of "
        "NumPy or JAX."
    )


def steps_in(directory: str) -> dict[int, Any]:
    """Returns the committed steps and their paths."""
    find = ocp.path.step.standard_name_format().find_all
    # listed again if empty: a listing made while one step is committed and the previous one deleted may miss both
    return {step.step: step.path for step in list(find(directory)) or find(directory)}


def find_step(directory: str, step: int | None, *, together: bool = True) -> Any:
    """Returns the path of a step.

    Args:
        directory: the directory of the steps.
        step: the number of the step; `None` means the latest one.
        together: whether every process calls this. Otherwise this also works before `jax.distributed.initialize`.

    Raises:
        FileNotFoundError: if there is no such step.
        OSError: if the processes see different steps.
    """
    paths = steps_in(directory)
    if step is None:
        step = max(paths, default=None)
    mine = -1 if step not in paths else step
    if together:
        _check_same(directory, mine)
    if mine >= 0:
        return paths[mine]
    if paths:
        raise FileNotFoundError(f"no step {step} in {directory}; it has {sorted(paths)}.")
    raise no_step(directory)


def no_step(directory: str) -> FileNotFoundError:
    """Returns the error for a directory without steps."""
    missing = "://" not in directory and not os.path.isdir(directory)
    return FileNotFoundError(
        f"no checkpoint in {directory}: "
        + ("no such directory" if missing else "it holds no complete step")
        + ". Give the directory that a run or an import has saved to."
    )


def agreed_steps(directory: str) -> list[int]:
    """Returns the committed steps, ascending, the same in all processes. Every process must call this.

    Raises:
        OSError: if the processes see different steps.
    """
    steps = sorted(steps_in(directory))
    _check_same(directory, max(steps, default=-1), len(steps))
    return steps


def set_aside(path: Any, reason: Literal["damaged", "abandoned"]) -> Any:
    """Renames a step's directory, in the first process only, so that it is no longer a step.

    Args:
        path: the path of the directory.
        reason: whether its files have changed since they were written, or the run has gone back to an earlier step.

    Returns:
        The new path, the first that is unused.
    """
    names = [f"{path.name}.{reason}", *(f"{path.name}.{reason}-{count}" for count in range(2, 100))]
    kept = next(one for one in (path.parent / name for name in names) if not one.exists())
    if jax.process_index() == 0:
        path.rename(kept)
    return kept


def _check_same(directory: str, step: int, count: int = 0) -> None:
    """Checks that all processes see the same step (-1 for none) and the same number of steps. Either all processes
    raise or none, because otherwise the others would wait for the one that raised."""
    mine = np.array([min(step, MOST), count], np.int64).view(np.int32)  # between processes, 64 bits may become 32
    seen = np.ascontiguousarray(of_all_processes(mine)).view(np.int64).tolist()
    if any(one != seen[0] for one in seen):
        raise OSError(
            f"the processes see different checkpoints in {directory}: step {[one for one, _ in seen]} in process "
            f"0 to {len(seen) - 1} (-1: none). The directory must be on a file system that all of them share."
        )


def refused_write(directory: str, error: Exception) -> OSError | None:
    """Returns the error for a save that failed because the system refused to write; `None` for any other `error`.

    Recognizes it by its text, because orbax's errors carry no error number.
    """
    number = next((number for number in _REMEDIES if os.strerror(number) in str(error)), None)
    if number is None:
        return None
    left = sorted(steps_in(directory))
    return OSError(
        number,
        f"{os.strerror(number)}: a step was not saved in {directory}. "
        + (f"Steps {left} are complete" if left else "It has no earlier step")
        + f". {_REMEDIES[number]}; the next save removes what was partly written.",
    )


def _check_writable(directory: Path) -> None:
    nearest = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    if not nearest.is_dir():
        raise NotADirectoryError(f"`directory` is {directory}, but {nearest} is a file. Choose another directory.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(
            f"`directory` is {directory}, but {nearest} cannot be written. Choose another directory, or pass "
            "`read_only=True` to restore only."
        )
