"""Makes everything that a run needs from its configuration: model, state, compiled step, batches."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from ... import hlo
from ...checkpoint import MAX_FILE_BYTES, Checkpoints
from ...models import (
    CHAT_TEMPLATE_FILE,
    TOKENIZER_FILE,
    ModelConfig,
    Origin,
    build,
    evaluation_weights,
    family_of,
)
from ...nn import ModelDef, abstract_model, init
from ...nonuniform import NonuniformStep, with_whole_sequences
from ...train import Loss, TrainState, eval_step, never_skip, train_step
from ..data import BYTES, Corpus, Loader, Rows
from ._divergence import Place
from ._meshes import Meshes, ReplicaLoader
from ._optimizer import learning_rate, optimizer_of
from ._resume import resume_from
from ._start import start_from, take_codes_from
from ._train_flags import TrainConfig, names_file
from ._watch import Watch

Metrics = dict[str, jax.Array]

# Parameters that are themselves the weights to evaluate are returned without a copy.
_weights = jax.jit(evaluation_weights)


@dataclasses.dataclass(frozen=True)
class Job:
    """A run, ready to start.

    Attributes:
        config: the configuration of the run.
        model: the configuration of the model.
        meshes: the meshes on which the run computes.
        corpus: the text.
        learning_rate: maps the number of updates made to the learning rate of the next update.
        train: the batches to train on.
        held_out: the held-out batches to evaluate on.
        evaluated: the batches of further texts to evaluate on, by name.
        loss: the loss function of the model's family.
        place: the step and the position in the data at which the run begins or continues.
        step: the compiled step, `(state, batch, skip) -> (state, metrics)`.
        evaluate: evaluates one batch, `(state, batch) -> metrics`.
        compile_s: the time that the compilation of the step took, in seconds.
        memory: the memory of the step, in bytes per device.
        trained: the number of parameters that the step trains.
        origin: the Hugging Face model that the parameters come from, and the run's tokenizer; stored in every
            checkpoint.
    """

    config: TrainConfig
    model: ModelConfig
    meshes: Meshes
    corpus: Corpus
    learning_rate: Callable[[int], float]
    train: Loader | ReplicaLoader
    held_out: Loader
    evaluated: dict[str, Loader]
    loss: Loss
    place: Place
    step: Callable[[TrainState, Any, jax.Array], tuple[TrainState, Metrics]]
    evaluate: Callable[[TrainState, Any], Metrics]
    compile_s: float
    memory: hlo.Memory
    trained: int
    origin: Origin = Origin()

    def evaluated_state(self, state: TrainState) -> TrainState:
        """Returns the state with its parameters replaced by the weights to evaluate.

        With a schedule-free optimizer, these take as much memory as the parameters for as long as they are used.
        """
        return dataclasses.replace(state, params=_weights(state.params, state.opt_state))

    def loss_on(self, loader: Loader, state: TrainState) -> float:
        """Returns the mean loss per token over the first `eval_batches` batches of a text: the same batches every time.

        Raises:
            ValueError: if the loss counts none of their tokens.
        """
        whole = -(-len(loader.windows) // loader.batch)
        evaluations = [self.evaluate(state, b) for b in loader.steps(0, min(self.config.eval_batches, whole))]
        tokens = [float(metrics["tokens"]) for metrics in evaluations]
        if not sum(tokens):
            raise ValueError(
                f"the first {len(tokens)} evaluation batches contain no answers, and the loss counts only answers. "
                "Use more --eval-batches, a larger --seq, or --loss-on all."
            )
        return float(np.dot([float(metrics["loss"]) for metrics in evaluations], tokens) / sum(tokens))


def prepare(
    config: TrainConfig,
    model: ModelConfig,
    meshes: Meshes,
    corpus: Corpus,
    checkpoints: Checkpoints,
    watch: Watch,
    *,
    resume: bool,
    at: int | None = None,
) -> tuple[Job, TrainState, Callable[[], None]]:
    """Makes or restores the state and compiles the step. Changes no file. The mesh must be in scope.

    Args:
        config: the configuration of the run.
        model: the configuration of the model.
        meshes: the meshes on which the run computes.
        corpus: the text.
        checkpoints: the checkpoints of the run.
        watch: the watch, which chooses where the state is restored from and is told of each activity.
        resume: whether to start from the latest checkpoint that is not damaged, if there is one.
        at: the step to resume from, instead of the latest.

    Returns:
        The job, the state, and a function that sets aside the steps that the run does not continue from. Every process
        must call this function, once nothing is left that could be refused.

    Raises:
        ValueError: if the checkpoint is from another model or was trained on other text, if all checkpoints are
            damaged, or if the run has already made more steps than `config.steps`.
    """
    recipe = config.step_recipe
    like, optimizer = abstract_state(config, model)
    source = watch.source(checkpoints, like)
    if resume or config.from_ is not None:
        watch.doing("restore")
    resumed = None
    if resume:
        resumed = resume_from(source, like, at, corpus, config.seq, in_memory=source is not checkpoints)
    place, origin = Place(0, 0), Origin()
    if resumed is not None:
        state, origin = resumed.state, resumed.origin
        place = Place.of_extra(resumed.step, resumed.extra)
        if place.step > config.steps:
            raise ValueError(
                f"`steps` is {config.steps}, but the run in {config.out} has already made {place.step}. Increase "
                "--steps, or start another run with another --out."
            )
    elif config.from_ is not None:
        base = like if config.adapters is None else TrainState.create(_abstract_base(model), optax.identity())
        params, origin = start_from(Path(config.from_), base, config.tokenizer)
        started = dataclasses.replace(base, params=params).model()
        adapted = config.adapt(started, nnx.Rngs(config.seed))
        take_codes_from(Path(config.from_), adapted)
        state = TrainState.create(adapted, optimizer, recipe=recipe)
    else:
        watch.doing("initialize")
        fresh = init(lambda rngs: build(model, rngs=rngs), nnx.Rngs(config.seed))
        state = TrainState.create(fresh, optimizer, recipe=recipe)
    if names_file(config.tokenizer) and not origin.has_tokenizer:
        origin = _with_tokenizer(origin, Path(config.tokenizer))
    if corpus.chat is not None and config.chat_template is not None:
        origin = origin.with_file(CHAT_TEMPLATE_FILE, corpus.chat.template.whole.encode())
    origin = origin.with_bytes(corpus.tokenizer is BYTES)
    watch.doing("compile")
    job = compile_step(config, model, meshes, corpus, state, optimizer, place)
    set_aside = (lambda: None) if resumed is None else resumed.set_aside
    return dataclasses.replace(job, origin=origin), state, set_aside


def _with_tokenizer(origin: Origin, file: Path) -> Origin:
    """Adds a run's tokenizer to an origin; if the file is too large to be stored, prints a message instead."""
    if file.stat().st_size <= MAX_FILE_BYTES:
        return origin.with_file(TOKENIZER_FILE, file.read_bytes())
    if jax.process_index() == 0:
        print(
            f"gtp-jax train: the tokenizer {file} is not stored with the checkpoints, because it has more than "
            f"{MAX_FILE_BYTES >> 20} MiB. Keep it: `gtp-jax generate` and exports need it.",
            file=sys.stderr,
            flush=True,
        )
    return origin


def abstract_state(config: TrainConfig, model: ModelConfig) -> tuple[TrainState, optax.GradientTransformation]:
    """Returns an abstract state (shapes and shardings), to which a checkpoint can be restored, and the optimizer."""
    abstract = abstract_model(lambda rngs: config.adapt(build(model, rngs=rngs), rngs))
    optimizer = optimizer_of(config, abstract)
    return TrainState.create(abstract, optimizer, recipe=config.step_recipe), optimizer


def _abstract_base(model: ModelConfig) -> nnx.Module:
    return abstract_model(lambda rngs: build(model, rngs=rngs))


def compile_step(
    config: TrainConfig,
    model: ModelConfig,
    meshes: Meshes,
    corpus: Corpus,
    state: TrainState,
    optimizer: optax.GradientTransformation,
    place: Place | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Job:
    """Compiles the step for a state, which may be abstract (see `abstract_state`). The mesh must be in scope."""
    schedule = learning_rate(config)

    def once(rows: Rows) -> Loader:
        return meshes.held_out_loader(rows, config.batch)

    train = meshes.loader(corpus.rows(config.seq, config.seed), config.batch, config.execution.microbatches)
    recipe = config.step_recipe
    loss = family_of(model).loss
    step = train_step(
        loss,
        optimizer,
        microbatches=config.execution.microbatches,
        max_grad_norm=config.max_grad_norm,
        recipe=recipe,
        pregathered_layers=config.quantization.pregathered_layers,
        view="local",
        seed=config.seed,
        reduce_over_dp=config.execution.reduce_over_dp,
        replicas=meshes.replicas,
        compiler_options=compiler_options,
    )
    evaluate: Callable[..., Metrics] = eval_step(loss, recipe=recipe, view="local")
    began = time.perf_counter()
    if isinstance(step, NonuniformStep):
        programs, run = step.compile(state, train.at(0)), step
        evaluation = functools.partial(_on_core, evaluate, step.tell, with_whole_sequences(state.model_def))
    else:
        run = step.lower(state, train.at(0), never_skip(meshes.mesh)).compile()  # pyright: ignore[reportFunctionMemberAccess]
        programs, evaluation = {"one step": run}, evaluate
    return Job(
        config=config,
        model=model,
        meshes=meshes,
        corpus=corpus,
        learning_rate=functools.partial(_here, schedule),
        train=train,
        held_out=once(corpus.held_out_rows(config.seq, config.seed)),
        evaluated={text.name: once(corpus.rows_of(text, config.seq, config.seed)) for text in corpus.evaluated},
        loss=loss,
        place=place or Place(0, 0),
        step=run,
        evaluate=evaluation,
        compile_s=time.perf_counter() - began,
        memory=_memory(programs, state),
        trained=sum(map(math.prod, state.model_def.logical_shapes(state.params).values())),
    )


def _on_core(
    evaluate: Callable[..., Metrics],
    tell: Callable[[Metrics], Metrics],
    model_def: ModelDef,
    state: TrainState,
    batch: Any,
) -> Metrics:
    """Evaluates a batch on the core, whose tensor-parallel degree need not divide sequences. Returns the metrics in all
    processes."""
    return tell(evaluate(dataclasses.replace(state, model_def=model_def), batch))


def _here(schedule: optax.Schedule, step: int) -> float:
    """Returns a schedule's value, computed on a device of this process, which may have none in the mesh in scope."""
    with jax.set_mesh(Mesh(np.array(jax.local_devices()[:1]), ("local",))):
        return float(np.asarray(schedule(step)))


def _memory(programs: dict[str, jax.stages.Compiled], state: TrainState) -> hlo.Memory:
    """Returns the memory of the program that takes the state, in bytes per device."""
    takes_state = next((program for name, program in programs.items() if name in ("one step", "update")), None)
    if takes_state is None:  # in a process that holds no part of the state
        return hlo.Memory(0, 0, 0, 0, 0, 0)
    own: Any = {"params": state.params, "opt_state": state.opt_state}
    if "one step" in programs:
        return hlo.memory(takes_state, **own, frozen=state.frozen)
    # the update of replicas does not take frozen weights, which their own programs do
    return dataclasses.replace(hlo.memory(takes_state, **own), frozen_bytes=hlo.bytes_per_device(state.frozen))
