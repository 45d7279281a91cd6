"""Checks and reads what a run starts from: a model, unless its parameters are random, and a recipe that fits it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ...checkpoint import Checkpoints, checkpoints_in
from ...inspect import explain
from ...mesh import of_all_processes
from ...models import (
    TOKENIZER_FILE,
    Adapters,
    LlamaConfig,
    ModelConfig,
    Origin,
    build,
    config_of,
    opened,
    preset_of,
    restore_evaluation_weights,
    saved_architecture,
)
from ...nn import abstract_model
from ...ops import check_ids
from ..data import Corpus, same_tokenizer
from ..flags import flag_of, knobs, sizes_of
from ._tokenizer import name_of_tokenizer, read_origin
from ._train_flags import BYTE_TOKENS, TrainConfig, names_file

# Process 0 sends this instead of a size that it could not read.
_UNREADABLE = -1


def vocab_size_of(config: TrainConfig, corpus: Corpus, run: Path | None) -> int:
    """Returns how many tokens the model of a run has to know. Every process must call this.

    Those of its tokenizer, unless the vocabulary is given, which it is by the model that the run starts from.

    Args:
        config: the run's configuration.
        corpus: the text.
        run: the run's checkpoints, if it is resumed.

    Raises:
        ValueError: if the run starts with a text that may have a token which its model lacks.
    """
    size = config.sizes.vocab_size
    if size is None:
        saved = None if run is None else _saved_vocab_size(Checkpoints(run, read_only=True))
        return corpus.vocab_size if saved is None else saved
    if run is None and corpus.vocab_size > size:
        _check_tokens(config, corpus, size)
    return size


def _check_tokens(config: TrainConfig, corpus: Corpus, size: int) -> None:
    """Checks a text by a tokenizer that knows more tokens than its model, as published ones do.

    Raises:
        ValueError: if the tokenizer is not the model's own, or the text has a token that the model lacks.
    """
    name, known = corpus.tokenizer.name, corpus.vocab_size
    if config.from_ is None:
        raise ValueError(
            f"`vocab_size` is {size}, and the tokenizer {name} has {known} tokens. Give at least as many, or leave "
            "--vocab-size out."
        )
    if config.tokenizer is not None:
        checkpoints = _open(Path(config.from_))
        if not _is_of(read_origin(checkpoints, checkpoints.manifest()), config.tokenizer):
            raise ValueError(
                f"the model in {config.from_} knows {size} tokens, and the tokenizer {name} has {known}. Leave "
                "--tokenizer out to take the one that was imported with the model, or give that one."
            )
    try:
        for where, stream in [
            *((corpus.name, one.tokens) for one in (*corpus.train, *corpus.held_out)),
            *((text.name, one.tokens) for text in corpus.evaluated for one in text.documents),
        ]:
            check_ids(stream, size, name=f"tokens of {where} by {name}")
    except ValueError as error:
        raise ValueError(
            f"{error} The tokenizer of the checkpoint in {config.from_} knows more tokens than its model. Leave out "
            "the text that has them; without a special end-of-text token, there is one more after every document."
        ) from None


def _saved_vocab_size(checkpoints: Checkpoints) -> int | None:
    """Returns the vocabulary of the latest step that says how large it is; `None` if none does.

    Process 0 reads it for all, so that none goes on with another one.

    Raises:
        OSError: in process 0, if its file system fails; in the others, a ValueError.
    """
    size, failure = 0, None
    if jax.process_index() == 0:
        try:
            size = _read_vocab_size(checkpoints)
        except Exception as error:  # which the others must hear of: they wait
            size, failure = _UNREADABLE, error
    size = int(of_all_processes(np.int32(size))[0])
    if failure is not None:
        raise failure
    if size == _UNREADABLE:
        raise ValueError("process 0 could not read the checkpoints; its own output says why.")
    return size or None


def _read_vocab_size(checkpoints: Checkpoints) -> int:
    for step in reversed(checkpoints.steps()):
        # a damaged step is passed over, as where the state is restored
        with contextlib.suppress(ValueError, FileNotFoundError, KeyError, TypeError):
            size = saved_architecture(checkpoints.manifest(step)["extra"])["vocab_size"]
            if type(size) is int and 0 < size < np.iinfo(np.int32).max:
                return size
    return 0


def started_from(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a new run, to which the model that it starts from has added its sizes and its tokenizer.

    Args:
        settings: as they were given.

    Raises:
        FileNotFoundError: if there is no checkpoint to start from.
        ValueError: if it does not say of which model it is, or settings contradict it, naming them.
    """
    if settings.get("from_") is None:
        return dict(settings)
    source = Path(settings["from_"]).expanduser()
    directory, checkpoints = opened(source)
    content = checkpoints.manifest()
    where = f"step {content['step']} in {directory}"
    if Adapters.of(content["extra"], where) is not None:
        raise ValueError(
            f"{where} is of a run that trained adapters. Merge them into their model, and start from that: `gtp-jax "
            f"convert merge {source} {source}-merged`. To go on with the run, give --resume --out {source}."
        )
    sizes = sizes_of(config_of(content["extra"], where))
    flags = _flags()
    lines = [
        f"  {flags[name]} is {settings[name]}, and its {name} is {size}"
        for name, size in sizes.items()
        if settings.get(name) is not None and not _same(name, settings[name], size)
    ]
    if settings.get("preset") is not None:
        preset = sizes_of(preset_of(settings["preset"]))
        lines += [
            f"  --preset {settings['preset']} has the {name} {preset.get(name)}, and its is {sizes.get(name)}"
            for name in {**sizes, **preset}
            if name != "vocab_size" and settings.get(name) is None and preset.get(name) != sizes.get(name)
        ]
    if lines:
        raise ValueError(
            f"the model of {where} decides the sizes of a run that starts from it, and these contradict it:\n"
            + "\n".join(lines)
            + "\nLeave them out, or start without --from."
        )
    found = {**sizes, **{name: value for name, value in settings.items() if value is not None or name not in sizes}}
    name, origin = found.get("tokenizer"), read_origin(checkpoints, content)
    if name is None or (names_file(name) and Path(name).is_file() and _is_of(origin, name)):
        found["tokenizer"] = name_of_tokenizer(source, origin)
    return found


def check_same_model(before: TrainConfig, config: TrainConfig, settings: Mapping[str, Any]) -> None:
    """Checks that a run goes on with its model.

    Args:
        before: the run's configuration.
        config: that it is to go on with.
        settings: that were given.

    Raises:
        ValueError: naming what differs.
    """
    sizes, now = sizes_of(before.base), sizes_of(config.base)
    if before.sizes.vocab_size is None and config.sizes.vocab_size is None:
        now["vocab_size"] = sizes["vocab_size"]  # which a preset does not decide
    differing = [name for name in {**sizes, **now} if sizes.get(name) != now.get(name)]
    if differing:
        given = [flag for name, flag in _flags().items() if name in settings and name in ("preset", *differing)]
        raise ValueError(
            "a resumed run keeps its model, and these contradict it:\n"
            + "\n".join(f"  its {name} is {sizes.get(name)}, not {now.get(name)}" for name in differing)
            + f"\nLeave out {', '.join(given)}, or start another run with another --out."
        )


def check_same_optimizer(before: TrainConfig, config: TrainConfig) -> None:
    """Checks that a run goes on with its optimizer, whose state the checkpoint has.

    Raises:
        ValueError: naming what differs.
    """
    lines, given = [], []
    if before.optimizer != config.optimizer:
        lines.append(f"  its optimizer is {before.optimizer}, not {config.optimizer}")
        given.append("--optimizer")
    if (before.average is None) != (config.average is None):
        lines.append(
            f"  it averages no weights, and average is {config.average}"
            if before.average is None
            else "  it averages weights, and average is not given"
        )
        given.append("--average")
    if lines:
        raise ValueError(
            "a resumed run keeps its optimizer, and these contradict it:\n"
            + "\n".join(lines)
            + f"\nLeave {' and '.join(given)} as the run has it, or start another run from its weights, with --from "
            "and another --out."
        )


def check_same_adapters(before: TrainConfig, config: TrainConfig) -> None:
    """Checks that a run goes on with what it trains, and with the base that it has frozen.

    Raises:
        ValueError: naming both.
    """
    if before.adapters != config.adapters:
        raise ValueError(
            f"a resumed run keeps what it trains: {_said(before.adapters)}, not {_said(config.adapters)}. Leave out "
            "--lora and what begins with it, or start another run with another --out."
        )
    if config.adapters is not None and before.quantization != config.quantization:
        raise ValueError(
            "a resumed run keeps the base that it has frozen, and its recipe with it: "
            f"{before.quantization.summary}, not {config.quantization.summary}. Leave --recipe and its options out, or "
            "start another run with another --out."
        )


def _said(adapters: Adapters | None) -> str:
    if adapters is None:
        return "the model itself"
    targets = "all projections" if adapters.targets is None else " ".join(adapters.targets)
    return f"adapters of rank {adapters.rank}, alpha {adapters.alpha:g}, dropout {adapters.dropout:g} on {targets}"


def _flags() -> dict[str, str]:
    """Returns the flags of a run by the names of their fields."""
    return {field.name: flag_of(field) for field in knobs(TrainConfig)}


def _same(name: str, asked: Any, size: Any) -> bool:
    """Says whether a setting is the same as a model's; a router that has a bias may move it at any rate."""
    return asked == size or (name == "router_bias_rate" and size is not None)


def check_terms(model: ModelConfig, corpus: Corpus) -> None:
    """Checks that a loss on answers is all that is added up: experts add terms that count every token.

    Raises:
        ValueError: naming the terms.
    """
    assert isinstance(model, LlamaConfig)
    if not model.num_experts or all(one.answers is None for one in corpus.train):
        return
    found = {"--aux-loss-coeff": model.aux_loss_coeff, "--router-z-loss-coeff": model.routing.z_loss_coeff}
    terms = [f"{flag} {value}" for flag, value in found.items() if value]
    if terms:
        raise ValueError(
            f"the loss counts answers alone, and the experts' terms ({', '.join(terms)}) every token, so that they "
            "would weigh more the fewer answers there are. Give 0 for these, or --loss-on all."
        )


def check_fits(config: TrainConfig, model: ModelConfig, mesh: Mesh) -> None:
    """Checks that a model, sharded over a mesh, has what the recipe and the adapters of a run name.

    Raises:
        ValueError: naming the module, the layers, the format or the projection that do not fit.
    """
    with jax.set_mesh(mesh):
        if config.adapters is None:
            explain(abstract_model(lambda rngs: build(model, rngs=rngs)), config.quantization.to_recipe())
        else:
            abstract_model(lambda rngs: config.adapt(build(model, rngs=rngs), rngs))


def start_from(directory: Path, state_like: Any, tokenizer: str | None) -> tuple[dict[str, Any], Origin]:
    """Returns the weights that the latest step there is evaluated with, on the shardings of a state's parameters, and
    their origin.

    The origin keeps its tokenizer only if it is the one that the run's text is read with; otherwise a message says what
    is left out.

    Args:
        directory: the checkpoints.
        state_like: shapes and shardings of the run's state.
        tokenizer: the run's, as `tokenizer` of its configuration; `None` if it is that of the model.
    """
    checkpoints = _open(directory)
    content = checkpoints.manifest()
    step, where = content["step"], f"the checkpoint in {directory}"
    params = restore_evaluation_weights(checkpoints, state_like, content)
    origin = Origin.of(content["extra"], checkpoints.files(step), where)
    if tokenizer is None or not origin.has_tokenizer or _is_of(origin, tokenizer):
        return params, origin
    if jax.process_index() == 0:
        text = "its tokens are bytes" if tokenizer == BYTE_TOKENS else f"`tokenizer` {tokenizer}"
        print(
            f"gtp-jax train: the tokenizer of {where} is left out of this run's checkpoints, because it is not shown "
            f"to be the one that the text is read with ({text}): {', '.join(origin.files)}. The ids of tokens in its "
            "config.json become null. To keep them, leave --tokenizer out.",
            file=sys.stderr,
            flush=True,
        )
    return params, origin.without_tokenizer()


def _is_of(origin: Origin, tokenizer: str) -> bool:
    """Returns whether the tokenizer that `--tokenizer` names is that of a model."""
    theirs = origin.files.get(TOKENIZER_FILE)
    return tokenizer != BYTE_TOKENS and theirs is not None and same_tokenizer(tokenizer, theirs)


def _open(directory: Path) -> Checkpoints:
    return Checkpoints(checkpoints_in(directory.expanduser()), read_only=True)
