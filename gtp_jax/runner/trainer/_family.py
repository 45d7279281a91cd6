"""The task of training a model of ours on text."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

from ... import hlo
from ...checkpoint import MAX_FILE_BYTES, Checkpoints
from ...layout import even_shares
from ...mesh import CP, check_degrees, device_memory, on_gpu, use_roles
from ...models import (
    CHAT_TEMPLATE_FILE,
    TOKENIZER_FILE,
    ModelConfig,
    Origin,
    build,
    family_of,
)
from ...models import saved as saved_of
from ...nn import ModelDef, abstract_model, init
from ...nonuniform import Batches, NonuniformStep, with_whole_sequences
from ...ops import check_ids
from ...train import Loss, TrainState, diagnose, eval_step, never_skip, train_step
from .._compiled import keep_compiled
from ..data import BYTES, Corpus, Loader
from ..launch import Launch
from ._agreement import check_devices
from ._directory import RunDirectory
from ._divergence import Place
from ._family_report import UNIT, heading, next_commands, results
from ._held import check_held_fits, held_of
from ._job import Evaluation, Job, Metrics
from ._log import Record
from ._loop import Outcome
from ._loss_chunk import choose_loss_chunk
from ._meshes import Meshes, ReplicaLoader, make_meshes, without_sequence_parallelism
from ._offloaded import check_offloaded
from ._optimizer import learning_rate, on_this_process, optimizer_of
from ._programs import compiled, memory_of
from ._resume import resume_from
from ._same_text import check_same_text, stored_text
from ._samples import sample
from ._settings_task import SettingsTask
from ._start import check_fits, check_terms, start_from, take_codes_from, vocab_size_of
from ._task import Baseline, Begin
from ._texts import evaluate_texts, held_out_loaders, unigram_of
from ._train_flags import TrainConfig, names_file
from ._watch import Supervision, Watch


class FamilyTask(SettingsTask):
    """Trains a model of ours on text; see `SettingsTask`."""

    def place(self, launch: Launch, begin: Begin, directory: RunDirectory, supervision: Supervision | None) -> None:
        """Makes the meshes and the configuration of the model; see `Task`."""
        config, corpus = self.config, self.corpus
        if launch.processes == 1 and (kept := keep_compiled()):
            print(kept, flush=True)
        planned = config if supervision is None else dataclasses.replace(config, faults=supervision.faults)
        check_devices(equally_many=not planned.faults.any)
        degrees = _degrees(config, supervision)
        vocab_size = vocab_size_of(config, corpus, directory.checkpoints if begin.resume else None)
        model = config.model(vocab_size, dtype="bfloat16" if on_gpu() else "float32")
        memory = device_memory()
        chunk, why = choose_loss_chunk(config, model, degrees, memory and memory.limit)
        model = dataclasses.replace(model, loss_chunk=chunk)
        if why and launch.process == 0:
            print(why, flush=True)
        if without_sequence_parallelism(planned, degrees):
            model = dataclasses.replace(model, sequence_parallel=False)
        with use_roles(config.parallelism.roles), even_shares():
            self.meshes = make_meshes(planned, degrees, lambda rngs: config.adapt(build(model, rngs=rngs), rngs))
        if config.execution.offloaded is not None and not self._uniform:
            raise ValueError(
                f"`offload` is {config.execution.offload!r}, but replicas continue at unequal degrees, and their step "
                "updates a state on the devices. Pass `--offload none`, or more failed devices, so that degrees are "
                "equal."
            )
        check_terms(model, corpus)
        with even_shares():
            check_fits(config, model, self.meshes.mesh)
        self.model = model
        self._supervised = supervision is not None
        with self.scope():
            like, optimizer = abstract_state(config, model)
            self._held = held_of(like, self.meshes.mesh, offloads=config.execution.offloaded is not None)
            check_held_fits(self._held)
            if config.execution.offloaded is not None:
                check_offloaded(like, optimizer)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Puts the mesh and its roles in scope."""
        with jax.set_mesh(self.meshes.mesh), use_roles(self.config.parallelism.roles), even_shares():
            yield

    def rehearse(self) -> None:
        """Compiles the step."""
        compile_step(self.config, self.model, self.meshes, self.corpus, *abstract_state(self.config, self.model))

    @functools.cached_property
    def _unigram(self) -> float:
        """The unigram entropy, in nats per token."""
        return unigram_of(self.corpus)

    def heading(self) -> str:
        """Returns the lines to print before the run."""
        return heading(self.config, self.model, self.meshes, self._held, self.corpus, self._unigram)

    def prepare(
        self, checkpoints: Checkpoints, watch: Watch, begin: Begin
    ) -> tuple[Job, TrainState, Callable[[], None]]:
        """Makes or restores the state and compiles the step; see `Task`."""
        config, model, corpus = self.config, self.model, self.corpus
        made: Any = {"recipe": config.step_recipe, "offload": config.execution.offloaded}
        like, optimizer = abstract_state(config, model)
        source = watch.source(checkpoints, like)
        if begin.resume or config.from_ is not None:
            watch.doing("restore")
        resumed = None
        if begin.resume:
            check = functools.partial(check_same_text, corpus=corpus, seq=config.seq)
            resumed = resume_from(source, like, begin.at, check, in_memory=source is not checkpoints)
        place, origin = Place(0, 0), Origin()
        if resumed is not None:
            state = resumed.state
            origin = Origin.of(resumed.extra, source.files(resumed.step), f"the checkpoint of step {resumed.step}")
            place = Place.to_continue(resumed.step, resumed.extra, config.steps, config.out)
        elif config.from_ is not None:
            base = TrainState.create(_abstract_base(model), optax.identity())
            params, origin = start_from(Path(config.from_), base, config.tokenizer)
            started = dataclasses.replace(base, params=params).model()
            adapted = config.adapt(started, nnx.Rngs(config.seed))
            take_codes_from(Path(config.from_), adapted)
            state = TrainState.create(adapted, optimizer, **made)
        else:
            watch.doing("initialize")
            fresh = init(lambda rngs: build(model, rngs=rngs), nnx.Rngs(config.seed))
            state = TrainState.create(fresh, optimizer, **made)
        if names_file(config.tokenizer) and not origin.has_tokenizer:
            origin = _with_tokenizer(origin, Path(config.tokenizer))
        if corpus.chat is not None and config.chat_template is not None:
            origin = origin.with_file(CHAT_TEMPLATE_FILE, corpus.chat.template.whole.encode())
        origin = origin.with_bytes(corpus.tokenizer is BYTES)
        watch.doing("compile")
        compiled = compile_step(config, model, self.meshes, corpus, state, optimizer)
        self._trained = sum(map(math.prod, state.model_def.logical_shapes(state.params).values()))
        set_aside = (lambda: None) if resumed is None else resumed.set_aside
        return self._job(compiled, place, origin), state, set_aside

    def _job(self, compiled: Compiled, place: Place, origin: Origin) -> Job:
        config, model, corpus = self.config, self.model, self.corpus
        stored = {**stored_text(corpus, config.seq), **saved_of(model), **origin.extra()}
        if config.adapters is not None:
            stored |= config.adapters.extra()
        # no text with replicas of unequal degree, which share no mesh, and on a mesh that divides sequences, where
        # `generate` does not run
        writes = bool(config.sample_tokens) and not self._supervised and self._uniform
        writes = writes and self.meshes.mesh.shape.get(CP, 1) == 1
        return Job(
            limits=config,
            settings=self.settings,
            mesh=self.meshes.mesh,
            train=compiled.train,
            place=place,
            step=compiled.step,
            evaluate=functools.partial(self._evaluate, compiled.evaluate),
            sample=functools.partial(sample, config, model, corpus) if writes else None,
            stored=lambda state, position: stored,
            files=origin.files,
            recipe=config.recipe,
            check_batch=self._check_ids,
            diagnose=functools.partial(self._diagnose, compiled.loss),
            learning_rate=functools.partial(on_this_process, learning_rate(config)),
            per_step=(config.batch * config.seq, "tokens"),
            shown={"unigram": f"{self._unigram:.2f}"},
            compile_s=compiled.compile_s,
            memory=compiled.memory,
        )

    @property
    def _uniform(self) -> bool:
        return self.meshes.plan is None or self.meshes.plan.uniform

    @functools.cached_property
    def _held_out(self) -> dict[str, Loader]:
        """The batches of texts that are not trained on, by the name of their loss in the log."""
        return held_out_loaders(self.config, self.corpus, self.meshes)

    def _evaluate(self, evaluate: Callable[[TrainState, Any], Metrics], state: TrainState) -> Evaluation:
        one = functools.partial(evaluate, state)
        return evaluate_texts(self.config, self.corpus, self._held_out, self._unigram, one)

    def _check_ids(self, batch: Any) -> None:
        """Refuses ids outside the vocabulary: they make the loss NaN, and are a mistake in the text."""
        for part in batch.parts if isinstance(batch, Batches) else (batch,):
            for name, ids in (part or {}).items():
                if name in ("tokens", "targets"):
                    check_ids(ids, self.model.vocab_size, name=name, ignore_negative=name == "targets")

    def _diagnose(self, loss: Loss, state: TrainState, batch: Any) -> str:
        if not self._uniform:
            return ""
        return str(diagnose(loss, state, batch, recipe=self.config.step_recipe, view="local", seed=self.config.seed))

    @property
    def title(self) -> str:
        """The title of the picture of losses."""
        config = self.config
        return f"{config.title}, {config.batch} x {config.seq} tokens per step, on {self.corpus.name}"

    @property
    def baseline(self) -> Baseline:
        """The unigram entropy."""
        return Baseline("unigram entropy", self._unigram)

    @property
    def loss_unit(self) -> str:
        """The unit of losses."""
        return UNIT

    def results(self, job: Job, outcome: Outcome, records: Sequence[Record]) -> list[tuple[str, str]]:
        """Returns the rows of the report's table of results."""
        trained, unigram = self._trained, self._unigram
        return results(self.config, self.model, self.meshes, self.corpus, trained, outcome, records, unigram)

    def next_steps(self) -> str:
        """Returns commands to continue with."""
        root, chats = RunDirectory.of(self.config.out).root, self.corpus.chat is not None
        return next_commands(root, self.config, self.model, self.meshes.mesh, chats=chats)


def _degrees(config: TrainConfig, supervision: Supervision | None) -> dict[str, int]:
    """Returns the degrees of the mesh, after checking them against the number of devices."""
    if supervision is None:
        degrees = config.degrees(jax.device_count(), virtual=not on_gpu())
    else:
        degrees = dict(supervision.degrees)
        if not supervision.faults.any:
            check_degrees(degrees, jax.device_count())
    if config.dtype == "float64" and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            "`dtype` is 'float64', which requires JAX_ENABLE_X64=1 in the environment. Set it, or use another --dtype."
        )
    return degrees


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
    made: Any = {"recipe": config.step_recipe, "offload": config.execution.offloaded}
    return TrainState.create(abstract, optimizer, **made), optimizer


def _abstract_base(model: ModelConfig) -> nnx.Module:
    return abstract_model(lambda rngs: build(model, rngs=rngs))


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiled step of a run.

    Attributes:
        loss: the loss function of the model's family.
        train: the batches to train on.
        step: the step, `(state, batch, skip) -> (state, metrics)`.
        evaluate: evaluates one batch, `(state, batch) -> metrics`.
        compile_s: the time that the compilation took, in seconds.
        memory: the memory of the step, in bytes per device.
    """

    loss: Loss
    train: Loader | ReplicaLoader
    step: Callable[[TrainState, Any, jax.Array], tuple[TrainState, Metrics]]
    evaluate: Callable[[TrainState, Any], Metrics]
    compile_s: float
    memory: hlo.Memory


def compile_step(
    config: TrainConfig,
    model: ModelConfig,
    meshes: Meshes,
    corpus: Corpus,
    state: TrainState,
    optimizer: optax.GradientTransformation,
    compiler_options: dict[str, Any] | None = None,
) -> Compiled:
    """Compiles the step for a state, which may be abstract (see `abstract_state`). The mesh must be in scope."""
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
        run = compiled(step, state, train.at(0), never_skip(meshes.mesh))
        programs, evaluation = {"one step": run}, evaluate
    return Compiled(loss, train, run, evaluation, time.perf_counter() - began, memory_of(programs, state))


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
