"""Trains any NNX model from a program."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from signal import SIGINT
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from ..._foreign import brief, printable
from ..._words import Offloaded
from ...mesh import Roles, current_roles, default_roles, make_mesh, of_all_processes
from ...recipes import Phases, Recipe
from ...train import Loss, TrainState, View, train_step
from ..flags import from_settings, knobs, settings_of
from ..launch import Launch, host_of_first
from ._agreement import Description, software
from ._any_model import AnyModel
from ._config_file import PROGRAM, read_config
from ._data_set import DataSet, PlacedData, in_words, rows_of
from ._directory import NOT_BEGUN, RunDirectory
from ._divergence import Diverged, Policy
from ._evaluations import evaluate_batches, rows_of_evaluations
from ._interrupt import Stopped
from ._job import Evaluation
from ._log import HELD_OUT, Record
from ._loop import Outcome
from ._model_task import Definition, EvaluateBatch, ModelTask
from ._run import run
from ._task import Begin
from ._trainer_options import OUTPUT, TrainerOptions
from ._watch import Supervision, Watch

# What an evaluation may return.
Evaluated = float | Mapping[str, float]

# The names of other numbers in the log.
_TAKEN = ("step", "loss", "grad_norm", "learning_rate", "expert_load", "examples_per_s", "continued_from")


@dataclasses.dataclass(frozen=True)
class Report:
    """How a run of a `Trainer` ended. As text, it is what the run printed at its end.

    Attributes:
        steps: the total number of updates made.
        state: the state after them.
        directory: the directory of the run.
        records: the records of its log; empty in all processes but the first.
        text: tables of time, memory and results; empty in all processes but the first.
    """

    steps: int
    state: TrainState
    directory: Path
    records: tuple[Record, ...]
    text: str

    def __str__(self) -> str:
        return self.text

    def model(self) -> Any:
        """Returns the model that was trained."""
        return self.state.model()


class Trainer:
    """Trains any NNX model, with any loss, on any batches: with a log, checkpoints, resumption and a report.

        trainer = gtp_jax.Trainer(model, loss, optax.adamw(3e-4), batches, out="runs/mine", steps=1000)
        report = trainer.run()

    Args:
        model: an `nnx.Module`, or a function of `nnx.Rngs` that returns one, whose weights are then created as shards.
            `gtp_jax.shard` shards it, unless it consists of gtp_jax's own layers, is sharded already, or has no weight
            of at least 16,384 elements. A module is sharded in place.
        loss: `(model, batch) -> loss`, as in `train_step`: a mean, or a sum and the number of tokens or examples that
            it counts.
        optimizer: any optax optimizer.
        data: the batches, which are pytrees of NumPy arrays with a row for each example: a list, another iterable, or a
            function without arguments that returns one, such as a generator function. It is read again after its last
            batch. If its iterators have `get_state` and `set_state`, as grain's do, checkpoints store their state;
            other iterables, except sequences, are read from the start when a run is resumed. In several processes, each
            must have all rows of all batches.
        out: the directory of checkpoints, log, curve and report.
        steps: the total number of updates.
        mesh: the mesh; by default, the one in scope, otherwise one of the degrees that follow.
        dp: the number of replicas; 1 by default.
        gtp: the number of shards of each weight; by default, the devices that the other degrees leave over.
        cp: the number of ranks that divide each sequence; 1 by default.
        ep: the number of ranks that divide experts; 1 by default.
        tp: the tensor-parallel degree; 1 by default.
        microbatches: the number of parts of a batch that run one after another.
        recipe: what is quantized, such as `gtp_jax.NVFP4()`; `gtp_jax.recipes.Phases` change it at given steps.
        view: the view of the loss, as in `train_step`.
        offload: what the host's memory holds between steps, as in `TrainState.create`.
        max_grad_norm: the norm to which larger gradients are scaled down; `None` for no limit.
        schedule: the optimizer's schedule of the learning rate, if it is to be logged.
        eval_data: batches to evaluate on, as `data`. The loss is computed in evaluation mode (`model.eval()`). Batches
            have the weight of what the loss counts; of their rows, if it returns a scalar.
        evaluate: `(model) -> number`, or a mapping of numbers by name; called with the model in evaluation mode, in
            every process, with the mesh in scope. The next step donates the arrays of this model.
        eval_every: the number of steps between evaluations; 0 for none.
        eval_batches: the number of batches of `eval_data` per evaluation; by default, all of a sequence.
        save_every: the number of steps between checkpoints.
        keep: the number of latest checkpoints to keep.
        keep_best: the number of checkpoints with the lowest loss on `eval_data` to keep in addition.
        log_to: names of trackers, `"tensorboard"` and `"wandb"`, that receive the numbers of the log too.
        nonfinite: what to do after a step that is not finite: `"raise"`, `"skip"` its batch, or `"rollback"` to the
            last checkpoint; such a step never changes the state.
        nonfinite_in_a_row: the number of such steps in a row after which `"skip"` ends the run and `"rollback"` goes
            back.
        max_rollbacks: how often the run may go back.
        spike: treat a loss this many robust standard deviations above the median of the latest ones like a step that is
            not finite; `None` for never.
        seed: the seed of the model's `nnx.Rngs` and of rounding.
        grace: the seconds from a signal until the process is ended by force; `None` for no limit.
        recorder: whether `gtp_jax.recorder` says who holds up a step that hangs.

    Raises:
        ValueError: if a number or a name is not allowed, or `data` or `eval_data` has no batches.
        TypeError: if an argument has the wrong type.
    """

    def __init__(
        self,
        model: nnx.Module | Callable[[nnx.Rngs], nnx.Module],
        loss: Loss,
        optimizer: optax.GradientTransformation,
        data: Any,
        *,
        out: str | os.PathLike[str],
        steps: int,
        mesh: Mesh | None = None,
        dp: int | None = None,
        gtp: int | None = None,
        cp: int | None = None,
        ep: int | None = None,
        tp: int | None = None,
        microbatches: int = 1,
        recipe: Recipe | Phases | None = None,
        view: View = "global",
        offload: Offloaded | None = None,
        max_grad_norm: float | None = None,
        schedule: Callable[[Any], Any] | None = None,
        eval_data: Any = None,
        evaluate: Callable[[Any], Evaluated] | None = None,
        eval_every: int = 100,
        eval_batches: int | None = None,
        save_every: int = 100,
        keep: int = 3,
        keep_best: int = 1,
        log_to: Sequence[str] = (),
        nonfinite: Policy = "raise",
        nonfinite_in_a_row: int = 3,
        max_rollbacks: int = 2,
        spike: float | None = None,
        seed: int = 0,
        grace: float | None = None,
        recorder: bool = True,
    ) -> None:
        options: Any = dict(microbatches=microbatches, max_grad_norm=max_grad_norm, recipe=recipe, view=view)
        train_step(loss, optimizer, **options)  # refuses what it cannot use
        limits: Any = dict(steps=steps, microbatches=microbatches, max_grad_norm=max_grad_norm, seed=seed)
        limits |= dict(out=os.fspath(out), log_to=(log_to,) if isinstance(log_to, str) else log_to, grace=grace)
        limits |= dict(recorder=recorder)
        limits |= dict(eval_every=eval_every, eval_batches=eval_batches, save_every=save_every, keep=keep)
        limits |= dict(offload=offload, keep_best=keep_best, nonfinite=nonfinite, spike=spike)
        limits |= dict(nonfinite_in_a_row=nonfinite_in_a_row, max_rollbacks=max_rollbacks)
        with _in_python():
            settings = from_settings(TrainerOptions, limits)
        if mesh is None:
            mesh = _mesh_of({"dp": dp, "gtp": gtp, "cp": cp, "ep": ep, "tp": tp})
        elif given := {name for name, size in dict(dp=dp, gtp=gtp, cp=cp, ep=ep, tp=tp).items() if size is not None}:
            raise ValueError(f"`mesh` is given, and so is {', '.join(sorted(given))}. Pass the mesh or degrees.")
        held_out = None if eval_data is None else DataSet(eval_data, "eval_data")
        if held_out is not None and eval_batches is None and held_out.length is None:
            raise ValueError("`eval_batches` is `None`, but `eval_data` has no length. Pass a number of batches.")
        self._task = _ProgramTask(
            settings,
            AnyModel(model, seed),
            loss,
            optimizer,
            DataSet(data),
            mesh,
            recipe,
            view,
            schedule,
            held_out,
            evaluate,
        )
        self._ran = False

    def run(self, *, resume: bool | Literal["auto"] = False, force: bool = False, step: int | None = None) -> Report:
        """Trains, evaluates and saves until all steps are made. Every process must call this.

        A signal (Ctrl-C, SIGTERM, SIGUSR1) ends the run after a step, with a checkpoint; this function then raises
        `KeyboardInterrupt` or `SystemExit`.

        Args:
            resume: whether to continue the run in `out`, as if it had never stopped; `"auto"` continues it if there is
                one. The settings may change, and changes are printed.
            force: whether to replace the run in `out`.
            step: the step to resume from; by default, the latest whose checkpoint is not damaged.

        Raises:
            ValueError: if the directory, the model or the data does not allow the run; before anything is written.
            Diverged: if the loss is not finite, or jumps, and the settings do not let the run continue.
            RuntimeError: if this is called a second time.
        """
        if self._ran:
            raise RuntimeError("this `Trainer` has run. Make another one, with a new model, to continue.")
        self._ran = True
        directory = RunDirectory.of(self._task.out)
        if resume == "auto":
            resume = directory.is_of_run
        if step is not None and not resume:
            raise ValueError("`step` is the step to resume from. Pass `resume=True`, or leave `step` out.")
        launch = _launch()
        try:
            with _in_python():
                ended = run(self._task, launch, Begin(resume, force, step))
        except Stopped as error:
            known = resume and directory.is_of_run or error.began
            where = directory.how_to_resume() if known else NOT_BEGUN
            print(f"gtp-jax: process {launch.process} was {error}. {where}", file=sys.stderr, flush=True)
            raise _of_signal(error.number) from None
        outcome = ended.outcome
        assert outcome is not None and outcome.state is not None
        if outcome.signal is not None:
            raise _of_signal(outcome.signal)
        return Report(outcome.step, outcome.state, directory.root, ended.records, ended.text)


class _ProgramTask(ModelTask):
    """The task of a `Trainer`."""

    def __init__(
        self,
        options: TrainerOptions,
        model: AnyModel,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        data: DataSet,
        mesh: Mesh,
        recipe: Recipe | Phases | None,
        view: View,
        schedule: Callable[[Any], Any] | None,
        eval_data: DataSet | None,
        evaluate: Callable[[Any], Evaluated] | None,
    ) -> None:
        self.out, self.limits, self._options_ = options.out, options, options
        self._model, self._loss, self._optimizer, self._data = model, loss, optimizer, data
        self._mesh, self._recipe, self._schedule = mesh, recipe, schedule
        self._view: View = view
        self._eval_data, self._evaluate = eval_data, evaluate
        self._roles = default_roles(mesh.axis_names) if current_roles() == Roles() else current_roles()
        self.program = _program()

    def resolve(self, begin: Begin) -> tuple[RunDirectory, list[str]]:
        """Checks the directory; see `Task`."""
        directory, changes = RunDirectory.checked(self.out, resume=begin.resume, force=begin.force), []
        if begin.resume:
            before = read_config(directory.config)
            if PROGRAM not in before:
                raise ValueError(
                    f"the run in {directory.root} is of `gtp-jax train`, which alone can continue it. Choose another "
                    "`out`."
                )
            kept = {field.name for field in knobs(TrainerOptions) if field.metadata["group"] == OUTPUT} | {PROGRAM}
            changes = [
                f"{name} from {before.get(name)} to {value}"
                for name, value in self.settings.items()
                if name not in kept and before.get(name) != value
            ]
        return directory, changes

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings by name; of objects, their names."""
        return {
            **{name: list(v) if isinstance(v, tuple) else v for name, v in settings_of(self._options_).items()},
            "mesh": dict(self._mesh.shape),
            "model": self._model.name,
            "loss": getattr(self._loss, "__name__", type(self._loss).__name__),
            "recipe": "none" if self._recipe is None else str(self._recipe),
            "view": self._view,
            PROGRAM: self.program,
        }

    @property
    def seeds(self) -> Mapping[str, int]:
        """The seeds of the run."""
        return dict.fromkeys(("weights", "rounding"), self._options_.seed)

    def read(self, launch: Launch, watch: Watch, begin: Begin) -> None:
        """Reads the first batch; see `Task`."""
        watch.doing("check")
        if begin.resume and self._data.passes_once and not self._data.has_state:
            self._data.go_to(0, {"data": {}})  # refuses
        self._data.batch(0)

    def describe(self, begin: Begin, supervision: Supervision | None) -> Description:
        """Returns everything that must be the same in all processes; see `Task`."""
        settings = {name: value for name, value in self.settings.items() if name not in ("out", PROGRAM)}
        return {**settings, "resume": begin.resume, "force": begin.force, "step": begin.at, **software()}

    @property
    def roles(self) -> Roles:
        """The roles of the axes of the mesh."""
        return self._roles

    def make_mesh(self) -> Mesh:
        """Returns the mesh."""
        return self._mesh

    def define(self) -> Definition:
        """Returns the model, its loss and its data."""
        options, first = self._options_, self._data.batch(0)
        source = PlacedData(self._data, self._mesh, self._roles, options.microbatches)
        source.at(0)  # refuses
        if self._data.passes_once and not self._data.has_state and jax.process_index() == 0:
            print(
                "`data` yields its batches once, so this run cannot be resumed. To be able to, pass the function that "
                "makes it, without calling it.",
                flush=True,
            )
        return Definition(
            model=self._model,
            loss=self._loss,
            optimizer=lambda model: self._optimizer,
            source=source,
            data=f"data    batches of {in_words(first)}",
            evaluate=None if self._eval_data is None and self._evaluate is None else self._evaluation,
            per_step=(rows_of(first), "examples"),
            schedule=self._schedule,
            recipe=self._recipe,
            recipe_in_words=self.settings["recipe"],
            view=self._view,
            microbatches=options.microbatches,
            max_grad_norm=options.max_grad_norm,
            seed=options.seed,
            offload=options.offload,
        )

    def _evaluation(self, model: nnx.Module, evaluate_batch: EvaluateBatch) -> Evaluation:
        data = None if self._eval_data is None else PlacedData(self._eval_data, self._mesh, self._roles)
        others = {} if self._evaluate is None else _numbers(self._evaluate(model))
        return evaluate_batches(data, self._options_.eval_batches, evaluate_batch, others)

    def evaluated(self, outcome: Outcome, records: Sequence[Record]) -> list[tuple[str, str]]:
        """Returns the rows of the latest evaluations."""
        return rows_of_evaluations(outcome, records)

    def next_steps(self) -> str:
        """Returns nothing: the program decides."""
        return ""


def _numbers(found: Any) -> dict[str, float]:
    """Returns the numbers that an evaluation returned, by name.

    Raises:
        TypeError: if it returned something else.
        ValueError: if a name is taken.
    """
    named = found if isinstance(found, Mapping) else {HELD_OUT: found}
    for name, value in named.items():
        number = isinstance(value, Real) or getattr(value, "shape", None) == ()
        if not isinstance(name, str) or not number:
            raise TypeError(
                f"`evaluate` returned {brief(found)}; it must return a number, or a mapping from names to numbers."
            )
        if name in _TAKEN:
            raise ValueError(f"`evaluate` returned {name!r}, which the log uses for another number. Rename it.")
    return {name: float(value) for name, value in named.items()}


def _mesh_of(degrees: Mapping[str, int | None]) -> Mesh:
    """Returns the mesh in scope, or one of the degrees that are given, if any."""
    given: dict[str, Any] = {name: size for name, size in degrees.items() if size is not None}
    in_scope = jax.sharding.get_mesh()
    if not given and not in_scope.empty:
        return in_scope
    if "gtp" not in given:
        rest = functools.reduce(lambda left, size: left * size, given.values(), 1)
        given["gtp"] = max(1, jax.device_count() // rest) if isinstance(rest, int) and rest > 0 else 1
    return make_mesh(**{"dp": 1, **given})


def _launch() -> Launch:
    """Returns the processes of the program, which JAX has connected."""
    count, own = jax.process_count(), jax.process_index()
    if count == 1:
        return Launch()
    address = np.zeros(256, np.uint8)
    if own == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        named = os.environ.get("JAX_COORDINATOR_ADDRESS", "").rpartition(":")[0]
        host = host_of_first() or named or socket.gethostname()
        text = f"{host}:{port}".encode()
        address[: len(text)] = np.frombuffer(text, np.uint8)
    told = of_all_processes(address)[0].tobytes().rstrip(b"\0").decode()
    return Launch(count, own, told)


def _program() -> str:
    """Returns the program of this process, for people."""
    return printable(sys.argv[0]) if sys.argv and sys.argv[0] else "Python"


def _of_signal(number: int) -> BaseException:
    """Returns the exception of a program that a signal ends."""
    return KeyboardInterrupt() if number == SIGINT else SystemExit(128 + number)


@contextmanager
def _in_python() -> Iterator[None]:
    """Names arguments in errors as a program does, not as flags of a command."""
    try:
        yield
    except (ValueError, Diverged) as error:
        text = re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda found: f"`{found[1].replace('-', '_')}`", str(error))
        if text == str(error):
            raise
        error.args = (text, *error.args[1:])
        raise
