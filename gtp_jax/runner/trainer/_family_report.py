"""Writes the heading, the results and the next commands of a run that trains a model of ours."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from ... import hlo
from ..._foreign import printable
from ...inspect import InspectOptions
from ...mesh import CP
from ...models import Adapters, ModelConfig
from ..data import DOCUMENTS, Corpus, bits_per_byte, tokens_of
from ..flags import flag_of, knobs, settings_of
from ._held import Held
from ._log import HELD_OUT, Record, loss_key
from ._loop import Outcome
from ._meshes import Meshes
from ._report import last_of, measured_at, mesh_in_words, speed, train_loss
from ._train_flags import TrainConfig, padded_seq

# The unit of losses.
UNIT = "nats per token"


def heading(config: TrainConfig, model: ModelConfig, meshes: Meshes, held: Held, corpus: Corpus, unigram: float) -> str:
    """Returns the heading: model, mesh, state, recipe and text, and the unigram entropy as the loss to beat."""
    device = jax.devices()[0]
    kind = "virtual CPU devices" if device.platform == "cpu" else device.device_kind
    packed = _packed(config, corpus)
    seq = padded_seq(config.seq, meshes.mesh.shape)
    if seq > config.seq:
        packed += f"padded  rows of {config.seq} tokens to {seq}, which cp x tp divides; no loss counts what is added\n"
    if config.sample_tokens and meshes.mesh.shape.get(CP, 1) > 1:
        packed += "samples none: the model writes no text on a mesh with cp\n"
    return (
        f"model   {config.title}: {model.param_count():,} parameters, {model.num_layers} layers, {model.dtype}\n"
        f"mesh    {_devices(meshes)} {kind}"
        f"{f' of {jax.process_count()} processes' if jax.process_count() > 1 else ''}\n"
        f"state   {held}\n"
        f"recipe  {config.recipe_in_words}\n"
        f"{text_in_words(config, corpus, unigram, packed)}"
    )


def text_in_words(config: TrainConfig, corpus: Corpus, unigram: float, rows: str | None = None) -> str:
    """Returns the lines of the heading about the text, and the unigram entropy as the loss to beat.

    Args:
        config: the configuration of the run.
        corpus: the text.
        unigram: the unigram entropy, in nats per token.
        rows: the lines about its rows; by default, those of rows that are not padded.
    """
    train, held_out = (sum(map(len, side)) for side in (corpus.train, corpus.held_out))
    rows = _packed(config, corpus) if rows is None else rows
    return (
        f"text    {corpus.name}: {tokens_of(corpus.train):,} tokens ({corpus.tokenizer.name}) of {_documents(train)}, "
        f"{tokens_of(corpus.held_out):,} of {_documents(held_out)} held out\n{rows}"
        f"to beat {unigram:.3f} nats per token: the unigram entropy of held-out tokens under the training text's counts"
    )


def _packed(config: TrainConfig, corpus: Corpus) -> str:
    if corpus.packing != DOCUMENTS:
        return ""
    rows = len(corpus.rows(config.seq, config.seed))
    filled = (tokens_of(corpus.train) - sum(map(len, corpus.train))) / (rows * config.seq)
    return f"rows    {rows:,} of {config.seq} tokens, of whole documents; {1 - filled:.1%} of them is padding\n"


def _documents(count: int) -> str:
    return f"{count} document" if count == 1 else f"{count} documents"


def next_commands(root: Path, config: TrainConfig, model: ModelConfig, mesh: Mesh, *, chats: bool) -> str:
    """Returns commands to continue with after a run has ended, each after a line that says what it does.

    Args:
        root: the directory of the run.
        config: the configuration of the run.
        model: the configuration of its model.
        mesh: the mesh of the run.
        chats: whether the run trained on conversations.
    """
    run = shlex.quote(str(root))

    def new(kind: str) -> str:
        """Returns the first path for an export that does not exist: those of earlier steps may."""
        paths = (Path(f"{root}-{kind}{f'-{count}' if count else ''}") for count in itertools.count())
        return shlex.quote(str(next(path for path in paths if not os.path.lexists(path))))

    prompt = shlex.quote("The " if config.data else "def ")
    speak = ("--chat 'Hello!'", "an answer of the model") if chats else (f"--prompt {prompt}", "text from the model")
    rows = [
        (f"gtp-jax generate {run} {speak[0]}", speak[1]),
        (resume_command(root, config), "train on, as many steps again"),
    ]
    if config.adapters is None:
        rows.append((f"gtp-jax convert export {run} {new('hf')}", "weights for Hugging Face's tools"))
    else:
        rows += [
            (f"gtp-jax convert export --peft {run} {new('peft')}", "the adapters alone, for PEFT"),
            (f"gtp-jax convert merge {run} {new('merged')}", "a model without adapters"),
        ]
    if config.adapters is None and not config.faults.any:  # `inspect` compiles a step that trains the whole model
        rows.append((f"gtp-jax inspect {_inspected(config, model, mesh)}", "what a step communicates, in bfloat16"))
    return "\n".join(["", "next:", *(f"  {what}:\n    {command}" for command, what in rows)])


def resume_command(root: Path, config: TrainConfig) -> str:
    """Returns the command that trains a run on, for as many steps again."""
    return f"gtp-jax train --resume --out {shlex.quote(str(root))} --steps {2 * config.steps}"


def _inspected(config: TrainConfig, model: ModelConfig, mesh: Mesh) -> str:
    """Returns the flags with which `gtp-jax inspect` compiles a run's step."""
    chosen = {"seq": padded_seq(config.seq, mesh.shape), "loss_chunk": model.loss_chunk or None}
    settings, words = {**settings_of(config), **mesh.shape, **chosen}, []
    for field in knobs(InspectOptions):
        value = settings.get(field.name)
        if value is None or value == field.default:
            continue
        if isinstance(value, bool):
            words.append(flag_of(field) if value else f"--no-{flag_of(field).removeprefix('--')}")
        else:
            words += [flag_of(field), *map(str, value if isinstance(value, tuple) else (value,))]
    return shlex.join(words)


def tflops_per_device(config: TrainConfig, model: ModelConfig, devices: int, tokens_per_s: float) -> float:
    """Returns the TFLOP/s per device. Recomputation is not counted."""
    tokens = config.batch * config.seq
    flops = hlo.step_flops(
        matmul_params=model.matmul_params(),
        tokens=tokens,
        layers=model.num_layers,
        seq=config.seq,
        heads=model.num_heads,
        head_dim=model.head_dim,
    )
    return flops / tokens * tokens_per_s / devices / 1e12


def results(
    config: TrainConfig,
    model: ModelConfig,
    meshes: Meshes,
    corpus: Corpus,
    trained: int,
    outcome: Outcome,
    records: Sequence[Record],
    unigram: float,
) -> list[tuple[str, str]]:
    """Returns the rows of the table of results.

    Args:
        config: the configuration of the run.
        model: the configuration of its model.
        meshes: the meshes of the run.
        corpus: the text.
        trained: the number of parameters that the step trains.
        outcome: how the loop ended.
        records: the records of the log.
        unigram: the unigram entropy, in nats per token.
    """
    adapters = config.adapters
    rows = [
        ("steps", f"{outcome.step} of {config.steps}"),
        ("parameters", f"{model.param_count():,} on {_devices(meshes)} devices"),
        *([("trainable", _trained(adapters, trained))] if adapters is not None else []),
        *train_loss(records, UNIT),
        *text_losses(corpus, outcome, records, unigram),
        *speed(outcome, "tokens"),
    ]
    if outcome.speed and jax.default_backend() == "gpu":
        rows.append(("", f"{tflops_per_device(config, model, meshes.size, outcome.speed):.1f} TFLOP/s a device"))
    return rows


def text_losses(corpus: Corpus, outcome: Outcome, records: Sequence[Record], unigram: float) -> list[tuple[str, str]]:
    """Returns the rows of the losses on texts that were not trained on."""
    rows = []
    if (found := last_of(records, HELD_OUT)) is not None:
        step, loss = found
        shown = f"{_measured(loss, corpus.bytes_per_token)}; {_verdict(loss, unigram)}"
        rows.append(("held-out loss", shown + measured_at(step, outcome)))
    for text in corpus.evaluated:
        if (found := last_of(records, loss_key(text.name))) is not None:
            step, loss = found
            shown = _measured(loss, text.bytes_per_token) + measured_at(step, outcome)
            rows.append((f"loss on {printable(text.name)}", shown))
    return rows


def _measured(loss: float, bytes_per_token: float) -> str:
    return f"{loss:.3f} {UNIT}, {bits_per_byte(loss, bytes_per_token):.2f} bits per byte"


def _trained(adapters: Adapters, trained: int) -> str:
    return f"{trained:,} parameters, of adapters of rank {adapters.rank}, alpha {adapters.alpha:g}; the rest is frozen"


def _verdict(held_out: float, unigram: float) -> str:
    if held_out < unigram:
        return f"{unigram - held_out:.3f} below the unigram entropy, {unigram:.3f}"
    return f"not yet below the unigram entropy, {unigram:.3f}"


def _devices(meshes: Meshes) -> str:
    """Returns a description of the meshes, and their number of devices."""
    if meshes.replicas is None or meshes.replicas.plan.uniform:
        return f"{mesh_in_words(meshes.mesh)}, {meshes.mesh.size}"
    pairs = zip(meshes.replicas.plan.replicas, meshes.replicas.meshes, strict=True)
    each = "; ".join(f"gtp {mesh.shape['gtp']} x tp {r.tp} on {r.batch} sequences" for r, mesh in pairs)
    return f"replicas of {each}; masters on {mesh_in_words(meshes.mesh)}; {len(meshes.replicas.plan.active)}"
