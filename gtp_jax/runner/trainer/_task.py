"""The interface through which the engine of runs (`_run.py`) learns what a run trains, and on what."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ...checkpoint import Checkpoints
from ...train import TrainState
from ..launch import Launch
from ._agreement import Description
from ._directory import RunDirectory
from ._job import Job, Limits
from ._log import Record
from ._loop import Outcome
from ._watch import Supervision, Watch


@dataclasses.dataclass(frozen=True)
class Begin:
    """How a run begins.

    Attributes:
        resume: whether to continue the run in the directory.
        force: whether to replace the run in the directory.
        at: the step to resume from; by default, the latest that is not damaged.
    """

    resume: bool = False
    force: bool = False
    at: int | None = None


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A loss to compare with, in pictures: its name and its value."""

    name: str
    loss: float


class Task(abc.ABC):
    """A model, its loss and its data, which a run trains. The engine calls the methods in the order of definition.

    Attributes:
        out: the directory of the run.
        limits: how long the run trains, and what it does on the way; known once `resolve` has returned.
        program: the program of this process, for people.
    """

    out: str
    limits: Limits
    program: str = "gtp-jax"

    @abc.abstractmethod
    def resolve(self, begin: Begin) -> tuple[RunDirectory, list[str]]:
        """Checks the settings and the directory. Called again once the run owns the directory.

        Returns:
            The directory, and the changes of a resumed run's settings, a phrase for each.

        Raises:
            ValueError: if a setting is invalid, or the directory does not allow such a run.
        """

    @property
    @abc.abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """All settings by name, as JSON values, for `config.json`, the record and trackers."""

    @property
    @abc.abstractmethod
    def seeds(self) -> Mapping[str, int]:
        """The seeds of the run, for the record."""

    @abc.abstractmethod
    def read(self, launch: Launch, watch: Watch, begin: Begin) -> None:
        """Chooses devices, and reads the data. Does not start JAX's backend."""

    @abc.abstractmethod
    def describe(self, begin: Begin, supervision: Supervision | None) -> Description:
        """Returns everything that must be the same in all processes, by name."""

    @abc.abstractmethod
    def place(self, launch: Launch, begin: Begin, directory: RunDirectory, supervision: Supervision | None) -> None:
        """Makes the mesh, and refuses what does not fit it. All processes compute the same."""

    @abc.abstractmethod
    def scope(self) -> AbstractContextManager[Any]:
        """Puts the mesh and its roles in scope."""

    def rehearse(self) -> None:
        """Compiles the step, for a supervisor that prepares other degrees.

        Raises:
            ValueError: if such a run cannot have a supervisor.
        """
        raise ValueError("`elastic` applies only to gtp_jax's own models. Remove --elastic.")

    @abc.abstractmethod
    def heading(self) -> str:
        """Returns the lines to print before the run."""

    @abc.abstractmethod
    def prepare(
        self, checkpoints: Checkpoints, watch: Watch, begin: Begin
    ) -> tuple[Job, TrainState, Callable[[], None]]:
        """Makes or restores the state and compiles the step. Changes no file. The mesh must be in scope.

        Args:
            checkpoints: the checkpoints of the run.
            watch: chooses where the state is restored from, and is told of each activity.
            begin: how the run begins.

        Returns:
            The job, the state, and a function that sets aside the steps that the run does not continue from. Every
            process must call this function, once nothing is left that could be refused.

        Raises:
            ValueError: if the checkpoint does not fit the run.
        """

    @property
    @abc.abstractmethod
    def title(self) -> str:
        """The title of the picture of losses."""

    @property
    def baseline(self) -> Baseline | None:
        """The loss to compare with in the picture; `None` for none."""
        return None

    @property
    @abc.abstractmethod
    def loss_unit(self) -> str:
        """The unit of losses, such as `nats per token`; empty if it is unknown."""

    @abc.abstractmethod
    def results(self, job: Job, outcome: Outcome, records: Sequence[Record]) -> list[tuple[str, str]]:
        """Returns the rows of the report's table of results."""

    @abc.abstractmethod
    def next_steps(self) -> str:
        """Returns what can be done after the run, for people; empty if there is nothing to say."""
