"""Passes the numbers of a run, in addition to its own log, to programs that plot them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

# The package that each tracker needs. The tracker's name is also that of the gtp_jax extra that installs the package.
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
TRACKERS = tuple(_PACKAGES)

# The longest time, in seconds, until TensorBoard sees a step.
_FLUSH_S = 10


class Tracker(Protocol):
    """Receives the numbers of a run: the same ones that `log.jsonl` holds."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Records the numbers of a step, by name."""
        ...

    def rewind(self, step: int) -> None:
        """Is called when the run continues from an earlier step, after which steps are repeated."""
        ...

    def close(self) -> None:
        """Writes what has not yet been written."""
        ...


def check_trackers(names: Collection[str]) -> None:
    """Checks that the packages of trackers are installed.

    Raises:
        ValueError: if packages are missing; the message says how to install them.
    """
    absent = [name for name in names if importlib.util.find_spec(_PACKAGES[name]) is None]
    if absent:
        packages = " and ".join(_PACKAGES[name] for name in absent)
        raise ValueError(
            f"`log_to` is {' '.join(names)}, but {packages} is not installed. Install it: pip install "
            f'"gtp_jax[{",".join(absent)}]". Or remove --log-to: log.jsonl has the same numbers.'
        )


def open_trackers(names: Collection[str], root: Path, step: int, settings: Mapping[str, Any]) -> list[Tracker]:
    """Returns trackers, each of which writes to the directory of its name within that of a run.

    Only the first process may call this.

    Args:
        names: the names of the trackers.
        root: the directory of the run.
        step: the number of updates made so far; 0 for a new run.
        settings: the settings of the run, by name.
    """
    makers: Mapping[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: _TensorBoard(root / "tensorboard", step),
        "wandb": lambda: _WandB(root, settings),
    }
    return [makers[name]() for name in names]


def delete_tracked(names: Collection[Any], root: Path) -> None:
    """Deletes what trackers have written for a run that is being replaced. Ignores names of no tracker."""
    for name in TRACKERS:
        if name in names and (root / name).is_dir() and not (root / name).is_symlink():
            shutil.rmtree(root / name)


class _TensorBoard:
    """Writes TensorBoard's event files, without TensorFlow."""

    def __init__(self, directory: Path, step: int) -> None:
        self._directory = directory
        # makes TensorBoard discard what earlier writers logged for later steps or, in a new run, for all steps
        self._writer = self._open(step + 1 if step else 0 if directory.exists() else None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(step + 1)

    def close(self) -> None:
        self._writer.close()

    def _open(self, purge_step: int | None) -> Any:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        # tensorboardX names files by the second, and would overwrite one that was created in the same second
        options = {"flush_secs": _FLUSH_S, "filename_suffix": f".{time.time_ns()}"}
        return SummaryWriter(str(self._directory), purge_step=purge_step, **options)


class _WandB:
    """Writes a Weights & Biases run, to disk unless WANDB_MODE says otherwise: nothing is uploaded unless asked for."""

    def __init__(self, root: Path, settings: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "gtp-jax"),
            name=os.environ.get("WANDB_NAME", root.name),
            dir=str(root),
            mode=os.environ.get("WANDB_MODE", "offline"),  # pyright: ignore[reportArgumentType]
            config={name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()},
            settings=wandb.Settings(console="off", silent=True),
        )
        # Not W&B's own step counter, which rejects a step that is repeated after a rollback.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def rewind(self, step: int) -> None:
        del step  # the plots' axis is `step`, which goes back by itself

    def close(self) -> None:
        self._run.finish()
