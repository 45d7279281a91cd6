"""Starts a run of `gtp-jax train`, in one of its processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from ..launch import LaunchOptions, find_launch
from ._config_file import read_config
from ._directory import NOT_BEGUN, RunDirectory
from ._family import FamilyTask
from ._interrupt import Stopped
from ._named_task import NamedTask
from ._run import run
from ._settings_task import SettingsTask
from ._task import Begin
from ._train_flags import TrainConfig
from ._watch import Supervision


def start(
    settings: Mapping[str, Any],
    options: LaunchOptions,
    *,
    resume: bool = False,
    force: bool = False,
    at: int | None = None,
    supervision: Supervision | None = None,
) -> int:
    """Trains a model, from the data to the report, in this process and those launched with it.

    Args:
        settings: the fields of `TrainConfig` and of its pieces, by name. A resumed run keeps its earlier values of
            fields that are not given.
        options: how the processes find each other.
        resume: whether to continue the run in `out`.
        force: whether to replace the run in `out`.
        at: the step to resume from; by default, the latest that is not damaged.
        supervision: the decisions of a supervisor, if one started this process.

    Returns:
        The exit code: 0, or 128 plus the number of the signal that ended the run.

    Raises:
        ValueError: if a setting, or what it names, is invalid; raised before anything is compiled.
        Diverged: if the loss is not finite, or jumps, and the settings do not let the run continue.
    """
    if at is not None and not resume:
        raise ValueError("`--step` selects the step to resume from. Add --resume, or remove --step.")
    launch = find_launch(options)
    task = task_of(settings, resume=resume)
    try:
        return run(task, launch, Begin(resume, force, at), supervision).code
    except Stopped as error:
        directory = RunDirectory.of(task.out)
        known = resume and directory.is_of_run or error.began
        where = directory.how_to_resume() if known else NOT_BEGUN
        print(f"gtp-jax: process {launch.process} was {error}. {where}", file=sys.stderr, flush=True)
        if launch.processes > 1 and supervision is None:
            os._exit(error.exit_code)  # at its exit, JAX would wait for the other processes
        return error.exit_code


def task_of(settings: Mapping[str, Any], *, resume: bool) -> SettingsTask:
    """Returns the task that settings describe, or that of the run that they resume."""
    named = settings.get("model_") is not None
    if resume and not named:
        directory = RunDirectory.of(settings.get("out", TrainConfig.out))
        named = directory.is_of_run and read_config(directory.config).get("model_") is not None
    return NamedTask(settings) if named else FamilyTask(settings)
