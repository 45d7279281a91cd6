"""Where a run's numbers go beside its own log: programs that draw them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

# By name, the package that a tracker needs and the extra of gtp_jax that brings it.
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
TRACKERS = tuple(_PACKAGES)

# Seconds after which TensorBoard sees a step.
_FLUSH_S = 10


class Tracker(Protocol):
    """What takes the numbers of a run, those that `log.jsonl` has."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes numbers of a step."""
        ...

    def rewind(self, step: int) -> None:
        """Hears that the run goes on from an earlier step, behind which steps come again."""
        ...

    def close(self) -> None:
        """Writes what has not been written."""
        ...


def check_trackers(names: Collection[str]) -> None:
    """Checks that the packages are there.

    Raises:
        ValueError: saying how to install those that are not.
    """
    absent = [name for name in names if importlib.util.find_spec(_PACKAGES[name]) is None]
    if absent:
        packages = " and ".join(_PACKAGES[name] for name in absent)
        raise ValueError(
            f"`log_to` is {' '.join(names)}, for which {packages} is not installed. Install it: pip install "
            f'"gtp_jax[{",".join(absent)}]". Or leave --log-to out: log.jsonl has the same numbers.'
        )


def open_trackers(names: Collection[str], root: Path, step: int, settings: Mapping[str, Any]) -> list[Tracker]:
    """Returns trackers that write into directories of their own names, within that of a run. For its first process.

    Args:
        names: of them.
        root: directory of the run.
        step: updates made so far; 0 of a new run.
        settings: of the run, by name.
    """
    makers: Mapping[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: _TensorBoard(root / "tensorboard", step),
        "wandb": lambda: _WandB(root, settings),
    }
    return [makers[name]() for name in names]


def delete_tracked(names: Collection[str], root: Path) -> None:
    """Deletes what trackers have written of a run that is being replaced."""
    for name in names:
        if (root / name).is_dir() and not (root / name).is_symlink():
            shutil.rmtree(root / name)


class _TensorBoard:
    """Event files, which need no TensorFlow."""

    def __init__(self, directory: Path, step: int) -> None:
        self._directory = directory
        # TensorBoard forgets what was written behind the step that the run goes on from, or begins at
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

        # tensorboardX names a file by the second, and would overwrite one that was begun in the same
        options = {"flush_secs": _FLUSH_S, "filename_suffix": f".{time.time_ns()}"}
        return SummaryWriter(str(self._directory), purge_step=purge_step, **options)


class _WandB:
    """A run of Weights & Biases, written to disk unless WANDB_MODE says otherwise: nothing is sent without being asked
    for."""

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
        # Not W&B's own count, which refuses a step that comes again after a rollback.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def rewind(self, step: int) -> None:
        del step  # its axis is `step`, which goes back

    def close(self) -> None:
        self._run.finish()
