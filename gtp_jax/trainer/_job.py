"""Everything a run needs, made from its configuration: model, state, compiled step, batches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from .. import plan
from ..checkpoint import Checkpoints
from ..data import Corpus, Loader, Windows
from ..mesh import DP, GTP
from ..models import ModelConfig, build, family_of
from ..nn import abstract_model, init
from ..train import TrainState, eval_step, train_step
from ._config import TrainConfig
from ._optimizer import adamw, learning_rate
from ._start import start_params
from ._watch import Watch

Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Job:
    """A run, ready to start.

    Attributes:
        config: what was asked for.
        model: sizes of the model.
        mesh: the devices.
        corpus: the text.
        learning_rate: `updates made -> rate of the next`.
        train: batches to train on.
        held_out: batches to evaluate on.
        step: the compiled step.
        evaluate: the evaluation of one batch.
        compile_s: seconds it took to compile the step.
        memory: bytes a device.
    """

    config: TrainConfig
    model: ModelConfig
    mesh: Mesh
    corpus: Corpus
    learning_rate: Callable[[int], float]
    train: Loader
    held_out: Loader
    step: jax.stages.Compiled
    evaluate: Callable[[TrainState, Any], Metrics]
    compile_s: float
    memory: plan.Memory

    def held_out_loss(self, state: TrainState) -> float:
        """Returns the mean loss over the tokens of the first few held-out batches, the same every time."""
        whole = -(-len(self.held_out.windows) // self.held_out.batch)
        evaluations = [self.evaluate(state, b) for b in self.held_out.steps(0, min(self.config.eval_batches, whole))]
        tokens = [float(metrics["tokens"]) for metrics in evaluations]
        return float(np.dot([float(metrics["loss"]) for metrics in evaluations], tokens) / sum(tokens))


def prepare(
    config: TrainConfig,
    model: ModelConfig,
    mesh: Mesh,
    corpus: Corpus,
    checkpoints: Checkpoints,
    watch: Watch,
    *,
    resume: bool,
) -> tuple[Job, TrainState]:
    """Makes or restores the state and compiles the step. To be called with the mesh in scope.

    Args:
        config: the run.
        model: sizes of the model.
        mesh: the devices.
        corpus: the text.
        checkpoints: of the run.
        watch: says where the state is restored from.
        resume: start from the latest checkpoint, if there is one.

    Raises:
        ValueError: if the checkpoint is of another model, or was trained on other text.
    """
    abstract = abstract_model(lambda rngs: build(model, rngs=rngs))
    optimizer = adamw(config, abstract)
    like = TrainState.create(abstract, optimizer)
    source = watch.source(checkpoints, like)
    watch.doing("restore")
    if resume and source.latest() is not None:
        state, extra = source.restore(like)
        if extra["text"] != corpus.fingerprint:
            raise ValueError(
                f"{corpus.name} is not the text that this run was trained on: its content has changed, or --data "
                "names another. Resume with the text as it was, or start a new run with another --out."
            )
    elif config.from_ is not None:
        params = start_params(Path(config.from_), like)
        state = TrainState.create(dataclasses.replace(like, params=params).model(), optimizer)
    else:
        state = TrainState.create(init(lambda rngs: build(model, rngs=rngs), nnx.Rngs(config.seed)), optimizer)
    return compile_step(config, model, mesh, corpus, watch, state), state


def compile_step(
    config: TrainConfig,
    model: ModelConfig,
    mesh: Mesh,
    corpus: Corpus,
    watch: Watch,
    state: TrainState | None = None,
) -> Job:
    """Compiles the step, for a state or for one as a checkpoint would be restored to. To be called with the mesh in
    scope."""
    abstract = abstract_model(lambda rngs: build(model, rngs=rngs))
    optimizer = adamw(config, abstract)
    like = TrainState.create(abstract, optimizer) if state is None else state
    schedule = learning_rate(config)
    parts = mesh.shape[DP] * mesh.shape[GTP] * config.execution.microbatches
    fill = -config.batch % parts  # where a lost device has left a number of ranks that does not divide the batch
    train = Loader(Windows(corpus.train, config.seq, config.seed), config.batch, mesh, fill=fill)
    held_out = Windows(corpus.held_out, config.seq, config.seed, repeat=False)
    recipe = config.quantization.to_recipe()
    loss = family_of(model).loss
    watch.doing("compile")
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
    )
    lowered = step.lower(like, train.at(0))  # pyright: ignore[reportFunctionMemberAccess]
    began = time.perf_counter()
    compiled = lowered.compile()
    return Job(
        config=config,
        model=model,
        mesh=mesh,
        corpus=corpus,
        learning_rate=lambda step: float(np.asarray(schedule(step))),
        train=train,
        held_out=Loader(held_out, config.batch, mesh, fill=fill),
        step=compiled,
        evaluate=eval_step(loss, recipe=recipe, view="local"),
        compile_s=time.perf_counter() - began,
        memory=plan.memory(compiled, params=like.params, opt_state=like.opt_state),
    )
