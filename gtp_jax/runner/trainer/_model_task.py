"""The task of training any NNX model with any loss."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from ..._words import Offloaded
from ...checkpoint import Checkpoints
from ...mesh import Roles, of_all_processes, use_roles
from ...recipes import Phases, Recipe
from ...train import Loss, TrainState, View, diagnose, eval_step, never_skip, train_step
from ..launch import Launch
from ._agreement import check_devices
from ._any_model import AnyModel
from ._directory import RunDirectory
from ._divergence import Place
from ._held import Held, check_held_fits, held_of
from ._job import Evaluation, Job, Metrics, Source
from ._log import Record
from ._loop import Outcome
from ._offloaded import check_offloaded
from ._optimizer import on_this_process
from ._programs import Programs, memory_of
from ._report import mesh_in_words, speed, train_loss
from ._resume import resume_from
from ._task import Begin, Task
from ._watch import Supervision, Watch

# Evaluates one batch.
EvaluateBatch = Callable[[Any], Metrics]


class StoredSource(Source, Protocol):
    """Batches whose position a checkpoint stores."""

    @property
    def digest(self) -> str:
        """A digest of the first batch or of all, which is the same in all processes."""
        ...

    def stored(self, position: int, /) -> dict[str, Any]:
        """Returns what a checkpoint holds in `extra`, before the batch at `position` is used."""
        ...

    def go_to(self, position: int, extra: Mapping[str, Any], /) -> str:
        """Moves to the batch at which a checkpoint was saved, or refuses another data set. Returns what was done, if it
        takes long."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Definition:
    """A model, its loss and its data, on a mesh.

    Attributes:
        model: the model.
        loss: the loss, as in `train_step`.
        optimizer: makes the optimizer of a model.
        source: the batches to train on.
        data: the lines of the heading about the data.
        evaluate: evaluates a model, given a function that evaluates one batch; `None` for no evaluations.
        per_step: the amount of work of a step, and its unit.
        schedule: the learning rate by the number of updates made, for the log; `None` if it is unknown.
        recipe: the recipe, as in `train_step`.
        recipe_in_words: the recipe, for people.
        view: the view of the loss, as in `train_step`.
        microbatches: as in `train_step`.
        max_grad_norm: as in `train_step`.
        seed: the seed of rounding.
        offload: what the host's memory holds, as in `TrainState.create`.
        loss_unit: the unit of losses; empty if it is unknown.
        shown: what the progress bar shows from the start.
    """

    model: AnyModel
    loss: Loss
    optimizer: Callable[[nnx.Module], optax.GradientTransformation]
    source: StoredSource
    data: str
    evaluate: Callable[[nnx.Module, EvaluateBatch], Evaluation] | None
    per_step: tuple[int, str]
    schedule: Callable[[Any], Any] | None
    recipe: Recipe | Phases | None
    recipe_in_words: str
    view: View
    microbatches: int
    max_grad_norm: float | None
    seed: int
    offload: Offloaded | None
    loss_unit: str = ""
    shown: Mapping[str, str] = dataclasses.field(default_factory=dict)


class ModelTask(Task):
    """Trains any NNX model. Its subclasses say which, with which loss, and on what.

    Attributes:
        mesh: the mesh; known once `place` has returned.
    """

    mesh: Mesh
    definition: Definition
    _held: Held

    @property
    @abc.abstractmethod
    def roles(self) -> Roles:
        """The roles of the axes of the mesh."""

    @abc.abstractmethod
    def make_mesh(self) -> Mesh:
        """Returns the mesh."""

    @abc.abstractmethod
    def define(self) -> Definition:
        """Returns the model, its loss and its data. The mesh is in scope."""

    def place(self, launch: Launch, begin: Begin, directory: RunDirectory, supervision: Supervision | None) -> None:
        """Makes the mesh, and finds the shapes of the state; see `Task`."""
        if supervision is not None:
            self.rehearse()  # refuses
        check_devices()
        self.mesh = self.make_mesh()
        with self.scope():
            self.definition = self.define()
            like, optimizer = self._abstract_state()
            self._held = held_of(like, self.mesh, offloads=self.definition.offload is not None)
            check_held_fits(self._held)
            if self.definition.offload is not None:
                check_offloaded(like, optimizer)
        self._check_same_data()

    def _check_same_data(self) -> None:
        """Checks that all processes have the same batches.

        Raises:
            ValueError: if they do not.
        """
        digests = of_all_processes(np.frombuffer(bytes.fromhex(self.definition.source.digest[:32]), np.uint8))
        if (digests != digests[0]).any():
            raise ValueError(
                "the processes of this run have different batches: every process must have all rows of every batch, in "
                "the same order, of which it uses those of its devices. Seed what shuffles the data, and do not divide "
                "it by process."
            )

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Puts the mesh and its roles in scope."""
        with jax.set_mesh(self.mesh), use_roles(self.roles):
            yield

    def _abstract_state(self) -> tuple[TrainState, optax.GradientTransformation]:
        model = self.definition.model.abstract()
        optimizer = self.definition.optimizer(model)
        return TrainState.create(model, optimizer, **self._made), optimizer

    @property
    def _made(self) -> dict[str, Any]:
        return {"recipe": self.definition.recipe, "offload": self.definition.offload}

    def heading(self) -> str:
        """Returns the lines to print before the run."""
        what, device = self.definition, jax.devices()[0]
        kind = "virtual CPU devices" if device.platform == "cpu" else device.device_kind
        processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
        return (
            f"model   {what.model.name}\n"
            f"mesh    {mesh_in_words(self.mesh)}, {self.mesh.size} {kind}{processes}\n"
            f"state   {self._held}\n"
            f"recipe  {what.recipe_in_words}\n"
            f"{what.data}"
        )

    def prepare(
        self, checkpoints: Checkpoints, watch: Watch, begin: Begin
    ) -> tuple[Job, TrainState, Callable[[], None]]:
        """Makes or restores the state and compiles the step; see `Task`."""
        what, place, resumed = self.definition, Place(0, 0), None
        like, optimizer = self._abstract_state()
        source = watch.source(checkpoints, like)
        if begin.resume:
            watch.doing("restore")
            resumed = resume_from(source, like, begin.at, lambda extra: None, in_memory=source is not checkpoints)
        if resumed is not None:
            state = resumed.state
            place = Place.to_continue(resumed.step, resumed.extra, self.limits.steps, self.out)
            if (done := what.source.go_to(place.position, resumed.extra)) and jax.process_index() == 0:
                print(done, flush=True)
        else:
            watch.doing("initialize")
            state = TrainState.create(what.model.fresh(), optimizer, **self._made)
        watch.doing("compile")
        self._params = sum(map(math.prod, state.model_def.logical_shapes(state.params).values()))
        set_aside = (lambda: None) if resumed is None else resumed.set_aside
        return self._job(state, optimizer, place), state, set_aside

    def _job(self, state: TrainState, optimizer: optax.GradientTransformation, place: Place) -> Job:
        what, options = self.definition, self._options
        say = functools.partial(print, file=sys.stderr, flush=True) if jax.process_index() == 0 else lambda text: None
        programs = Programs(
            train_step(
                what.loss,
                optimizer,
                microbatches=what.microbatches,
                max_grad_norm=what.max_grad_norm,
                seed=what.seed,
                **options,
            ),
            say,
        )
        program = programs.compiled(state, what.source.at(place.position), never_skip(self.mesh))
        evaluate_batch = eval_step(functools.partial(_evaluated, what.loss), **options)
        evaluate = what.evaluate

        def evaluation(state: TrainState) -> Evaluation:
            assert evaluate is not None
            model = state.model()
            model.eval()
            return evaluate(model, functools.partial(evaluate_batch, state))

        return Job(
            limits=self.limits,
            settings=self.settings,
            mesh=self.mesh,
            train=what.source,
            place=place,
            step=programs,
            evaluate=None if evaluate is None else evaluation,
            stored=lambda state, position: what.source.stored(position),
            recipe=what.recipe,
            diagnose=lambda state, batch: str(diagnose(what.loss, state, batch, seed=what.seed, **options)),
            learning_rate=None if what.schedule is None else functools.partial(on_this_process, what.schedule),
            per_step=what.per_step,
            shown=what.shown,
            compile_s=programs.compile_s,
            memory=memory_of({"one step": program}, state),
        )

    @property
    def _options(self) -> dict[str, Any]:
        return {"recipe": self.definition.recipe, "view": self.definition.view}

    @property
    def title(self) -> str:
        """The title of the picture of losses."""
        return f"{self.definition.model.name}, on {mesh_in_words(self.mesh)}"

    @property
    def loss_unit(self) -> str:
        """The unit of losses."""
        return self.definition.loss_unit

    def results(self, job: Job, outcome: Outcome, records: Sequence[Record]) -> list[tuple[str, str]]:
        """Returns the rows of the report's table of results."""
        return [
            ("steps", f"{outcome.step} of {self.limits.steps}"),
            ("parameters", f"{self._params:,} on {mesh_in_words(self.mesh)}, {self.mesh.size} devices"),
            *train_loss(records, self.loss_unit),
            *self.evaluated(outcome, records),
            *speed(outcome, self.definition.per_step[1]),
        ]

    @abc.abstractmethod
    def evaluated(self, outcome: Outcome, records: Sequence[Record]) -> list[tuple[str, str]]:
        """Returns the rows of what was evaluated."""


def _evaluated(loss: Loss, model: nnx.Module, batch: Any) -> Any:
    """Computes the loss of a model in evaluation mode: without dropout, and with the statistics of training."""
    model.eval()
    return loss(model, batch)
