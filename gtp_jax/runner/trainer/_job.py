"""Defines a run as the training loop sees it, whatever the model, the loss and the data are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from ... import hlo
from ...mesh import on_device
from ...models import evaluation_weights
from ...recipes import Phases, Recipe
from ...train import TrainState
from ._divergence import Divergence, Place

Metrics = dict[str, jax.Array]

# Parameters that are themselves the weights to evaluate are returned without a copy.
_weights = jax.jit(evaluation_weights)


class Limits(Protocol):
    """How long a run trains, and what it does on the way. Each attribute is a setting of that name."""

    @property
    def steps(self) -> int: ...
    @property
    def eval_every(self) -> int: ...
    @property
    def save_every(self) -> int: ...
    @property
    def keep(self) -> int: ...
    @property
    def keep_best(self) -> int: ...
    @property
    def log_to(self) -> tuple[str, ...]: ...
    @property
    def grace(self) -> float | None: ...
    @property
    def recorder(self) -> bool: ...
    @property
    def divergence(self) -> Divergence: ...


class Source(Protocol):
    """The batches to train on, by position: batch 0 is the first one."""

    def at(self, position: int, /) -> Any:
        """Returns a batch. A source that reads a stream has only the latest ones."""
        ...

    def steps(self, begin: int, end: int, /) -> Iterator[Any]:
        """Yields batches `begin` to `end` (exclusive)."""
        ...


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        values: the numbers to log, by name.
        loss: the number by which checkpoints are ranked, less being better; `None` if there is none.
        shown: the numbers that the progress bar shows, as text by name.
        text: the lines to print.
    """

    values: Mapping[str, float]
    loss: float | None
    shown: Mapping[str, str]
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A run, ready to start.

    Attributes:
        limits: how long the run trains, and what it does on the way.
        settings: all settings by name, for trackers.
        mesh: the mesh of the state.
        train: the batches to train on.
        place: the step and the position in the data at which the run begins or continues.
        step: the compiled step, `(state, batch, skip) -> (state, metrics)`.
        evaluate: evaluates a state whose parameters are the weights to evaluate; `None` if nothing is evaluated.
        sample: lets the model write a text, in such a state; `None` for no texts.
        stored: returns what a checkpoint holds in `extra`, in addition to the place, for a state and the position of
            the next batch.
        files: the files that a checkpoint holds, by name.
        recipe: the recipe, for the record.
        check_batch: refuses a batch after which the loss was not finite, if the batch itself is the mistake.
        diagnose: says in words why the step with a batch was not finite; an empty text if that is unknown.
        learning_rate: maps the number of updates made to the learning rate of the next update, for the log; `None` if
            it is unknown.
        per_step: the amount of work of a step, and its unit, such as 2048 and "tokens".
        shown: what the progress bar shows from the start, as text by name.
        compile_s: the time that the compilation of the step took, in seconds.
        memory: the memory of the step, in bytes per device.
    """

    limits: Limits
    settings: Mapping[str, Any]
    mesh: Mesh
    train: Source
    place: Place
    step: Callable[[TrainState, Any, jax.Array], tuple[TrainState, Metrics]]
    evaluate: Callable[[TrainState], Evaluation] | None
    sample: Callable[[TrainState], str] | None = None
    stored: Callable[[TrainState, int], dict[str, Any]] = lambda state, position: {}
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    recipe: Recipe | Phases | None
    check_batch: Callable[[Any], None] = lambda batch: None
    diagnose: Callable[[TrainState, Any], str] = lambda state, batch: ""
    learning_rate: Callable[[int], float] | None
    per_step: tuple[int, str]
    shown: Mapping[str, str] = dataclasses.field(default_factory=dict)
    compile_s: float
    memory: hlo.Memory


def evaluated_state(state: TrainState) -> TrainState:
    """Returns a state with its parameters replaced by the weights to evaluate, in the memory of the devices.

    With a schedule-free optimizer, and if they are kept on the host, these take as much memory as the parameters for as
    long as they are used.
    """
    return dataclasses.replace(state, params=on_device(_weights(state.params, state.opt_state)))
