"""Checks and reads what a run starts from: the model of `--from`, if any, and a recipe that must fit the model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
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
    take_stored_codes,
)
from ...nn import abstract_model
from ...ops import check_ids
from ...recipes import recipes_of
from ..data import Corpus, same_tokenizer
from ..flags import flag_of, knobs, sizes_of
from ._tokenizer import name_of_tokenizer, read_origin
from ._train_flags import BYTE_TOKENS, TrainConfig, names_file

# Process 0 sends this instead of a vocabulary size that it could not read.
_UNREADABLE = -1


def vocab_size_of(config: TrainConfig, corpus: Corpus, run: Path | None) -> int:
    """Returns the vocabulary size that the model of a run needs. Every process must call this.

    If the configuration gives the size, as the model that a run starts from does, that is used; otherwise, the size
    that a resumed run's checkpoints record; otherwise, the tokenizer's.

    Args:
        config: the configuration of the run.
        corpus: the text of the run.
        run: the directory of the run's checkpoints, if the run is resumed.

    Raises:
        ValueError: if a new run's tokenizer has more tokens than its model, and it is not the model's own or the text
            has a token that the model does not know.
    """
    size = config.sizes.vocab_size
    if size is None:
        saved = None if run is None else _saved_vocab_size(Checkpoints(run, read_only=True))
        return corpus.vocab_size if saved is None else saved
    if run is None and corpus.vocab_size > size:
        _check_tokens(config, corpus, size)
    return size


def _check_tokens(config: TrainConfig, corpus: Corpus, size: int) -> None:
    """Checks text whose tokenizer has more tokens than the model, as those of published models may.

    Raises:
        ValueError: if the tokenizer is not the model's own, or the text has a token that the model does not know.
    """
    name, known = corpus.tokenizer.name, corpus.vocab_size
    if config.from_ is None:
        raise ValueError(
            f"`vocab_size` is {size}, but the tokenizer {name} has {known} tokens. Give at least {known}, or remove "
            "--vocab-size."
        )
    if config.tokenizer is not None:
        checkpoints = _open(Path(config.from_))
        if not _is_of(read_origin(checkpoints, checkpoints.manifest()), config.tokenizer):
            raise ValueError(
                f"the model in {config.from_} has {size} tokens, but the tokenizer {name} has {known}. Remove "
                "--tokenizer to use the one that was imported with the model, or give that one."
            )
    try:
        for where, stream in [
            *((corpus.name, one.tokens) for one in (*corpus.train, *corpus.held_out)),
            *((text.name, one.tokens) for text in corpus.evaluated for one in text.documents),
        ]:
            check_ids(stream, size, name=f"tokens of {where} by {name}")
    except ValueError as error:
        raise ValueError(
            f"{error} The tokenizer of the checkpoint in {config.from_} has more tokens than its model. Remove the "
            "text that contains them. If no end-of-text token is special, one more token follows every document."
        ) from None


def _saved_vocab_size(checkpoints: Checkpoints) -> int | None:
    """Returns the vocabulary size of the latest step that records it; `None` if no step does.

    Process 0 reads it for all processes, so that all continue with the same size.

    Raises:
        OSError: in process 0, if its file system fails. The other processes then raise a ValueError.
    """
    size, failure = 0, None
    if jax.process_index() == 0:
        try:
            size = _read_vocab_size(checkpoints)
        except Exception as error:  # must be sent to the others, which wait
            size, failure = _UNREADABLE, error
    size = int(of_all_processes(np.int32(size))[0])
    if failure is not None:
        raise failure
    if size == _UNREADABLE:
        raise ValueError("process 0 could not read the checkpoints; its own output says why.")
    return size or None


def _read_vocab_size(checkpoints: Checkpoints) -> int:
    for step in reversed(checkpoints.steps()):
        # damaged steps are skipped, as in restoring the state
        with contextlib.suppress(ValueError, FileNotFoundError, KeyError, TypeError):
            size = saved_architecture(checkpoints.manifest(step)["extra"])["vocab_size"]
            if type(size) is int and 0 < size < np.iinfo(np.int32).max:
                return size
    return 0


def started_from(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a new run, with the sizes and the tokenizer of the model that it starts from added.

    Args:
        settings: the settings that were given.

    Raises:
        FileNotFoundError: if there is no checkpoint to start from.
        ValueError: if the checkpoint does not say which model it contains or is from a run with adapters, or if
            settings contradict the model; the message names them.
    """
    if settings.get("from_") is None or settings.get("model_") is not None:
        return dict(settings)
    source = Path(settings["from_"]).expanduser()
    directory, checkpoints = opened(source)
    content = checkpoints.manifest()
    where = f"step {content['step']} in {directory}"
    if Adapters.of(content["extra"], where) is not None:
        raise ValueError(
            f"{where} is of a run that trained adapters. Merge them into their model, and start from the result: "
            f"`gtp-jax convert merge {source} {source}-merged`. To continue that run, pass --resume --out {source}."
        )
    sizes = sizes_of(config_of(content["extra"], where))
    flags = _flags()
    lines = [
        f"  {flags[name]} is {settings[name]}, but its {name} is {size}"
        for name, size in sizes.items()
        if settings.get(name) is not None and not _same(name, settings[name], size)
    ]
    if settings.get("preset") is not None:
        preset = sizes_of(preset_of(settings["preset"]))
        lines += [
            f"  --preset {settings['preset']} has the {name} {preset.get(name)}, but its is {sizes.get(name)}"
            for name in {**sizes, **preset}
            if name != "vocab_size" and settings.get(name) is None and preset.get(name) != sizes.get(name)
        ]
    if lines:
        raise ValueError(
            f"a run that starts from {where} has the sizes of its model, and these contradict them:\n"
            + "\n".join(lines)
            + "\nRemove them, or start without --from."
        )
    found = {**sizes, **{name: value for name, value in settings.items() if value is not None or name not in sizes}}
    name, origin = found.get("tokenizer"), read_origin(checkpoints, content)
    if name is None or (names_file(name) and Path(name).is_file() and _is_of(origin, name)):
        found["tokenizer"] = name_of_tokenizer(source, origin)
    return found


def check_same_model(before: TrainConfig, config: TrainConfig, settings: Mapping[str, Any]) -> None:
    """Checks that a resumed run keeps its model.

    Args:
        before: the configuration of the run until now.
        config: the configuration with which it is to continue.
        settings: the settings that were given.

    Raises:
        ValueError: if sizes differ; the message names them.
    """
    if before.model_ is not None or config.model_ is not None:
        if before.model_ != config.model_:
            was = "a model of gtp_jax" if before.model_ is None else before.model_
            raise ValueError(
                f"a resumed run keeps its model, which is {was}, not {config.model_}. Remove --model, or start another "
                "run with another --out."
            )
        return
    sizes, now = sizes_of(before.base), sizes_of(config.base)
    if before.sizes.vocab_size is None and config.sizes.vocab_size is None:
        now["vocab_size"] = sizes["vocab_size"]  # the vocabulary is not decided by the preset
    differing = [name for name in {**sizes, **now} if sizes.get(name) != now.get(name)]
    if differing:
        given = [flag for name, flag in _flags().items() if name in settings and name in ("preset", *differing)]
        raise ValueError(
            "a resumed run keeps its model, and these contradict it:\n"
            + "\n".join(f"  its {name} is {sizes.get(name)}, not {now.get(name)}" for name in differing)
            + f"\nRemove {', '.join(given)}, or start another run with another --out."
        )


def check_same_optimizer(before: TrainConfig, config: TrainConfig) -> None:
    """Checks that a resumed run keeps its optimizer, because the checkpoint holds that optimizer's state.

    Raises:
        ValueError: if the optimizer, the format of its state or the use of a weight average differs; the message says
            how.
    """
    lines, given = [], []
    if before.optimizer != config.optimizer:
        lines.append(f"  its optimizer is {before.optimizer}, not {config.optimizer}")
        given.append("--optimizer")
    if before.optimizer_state != config.optimizer_state:
        lines.append(f"  its optimizer_state is {before.optimizer_state}, not {config.optimizer_state}")
        given.append("--optimizer-state")
    if (before.average is None) != (config.average is None):
        lines.append(
            f"  it averages no weights, but average is {config.average}"
            if before.average is None
            else "  it averages weights, but average is not given"
        )
        given.append("--average")
    if lines:
        raise ValueError(
            "a resumed run keeps its optimizer, and these contradict it:\n"
            + "\n".join(lines)
            + f"\nLeave {' and '.join(given)} unchanged, or start another run from its weights, with --from and "
            "another --out."
        )


def check_same_adapters(before: TrainConfig, config: TrainConfig) -> None:
    """Checks that a resumed run keeps what it trains (the model or adapters) and its frozen base.

    Raises:
        ValueError: if one of these differs; the message names the old and the new value.
    """
    if before.adapters != config.adapters:
        raise ValueError(
            f"a resumed run keeps what it trains: {_said(before.adapters)}, not {_said(config.adapters)}. Remove "
            "--lora and all --lora-* flags, or start another run with another --out."
        )
    if config.adapters is not None and before.quantization != config.quantization:
        raise ValueError(
            f"a resumed run keeps its frozen base and the recipe of that base: {before.quantization.summary}, not "
            f"{config.quantization.summary}. Remove --recipe and its options, or start another run with another "
            "--out."
        )


def _said(adapters: Adapters | None) -> str:
    if adapters is None:
        return "the model itself"
    targets = "all projections" if adapters.targets is None else " ".join(adapters.targets)
    return f"adapters of rank {adapters.rank}, alpha {adapters.alpha:g}, dropout {adapters.dropout:g} on {targets}"


def _flags() -> dict[str, str]:
    """Returns the flags of `TrainConfig`, by the names of its fields."""
    return {field.name: flag_of(field) for field in knobs(TrainConfig)}


def _same(name: str, asked: Any, size: Any) -> bool:
    """Returns whether a setting agrees with a model's. If the router has a bias, its update rate may differ."""
    return asked == size or (name == "router_bias_rate" and size is not None)


def check_terms(model: ModelConfig, corpus: Corpus) -> None:
    """Checks that a loss that counts only answers has no terms of experts, because these count every token.

    Raises:
        ValueError: if there are such terms; the message names them.
    """
    assert isinstance(model, LlamaConfig)
    if not model.num_experts or all(one.answers is None for one in corpus.train):
        return
    found = {"--aux-loss-coeff": model.aux_loss_coeff, "--router-z-loss-coeff": model.routing.z_loss_coeff}
    terms = [f"{flag} {value}" for flag, value in found.items() if value]
    if terms:
        raise ValueError(
            f"the loss counts only answers, but the experts' terms ({', '.join(terms)}) count every token, so they "
            "would weigh more the fewer answers there are. Set them to 0, or use --loss-on all."
        )


def check_fits(config: TrainConfig, model: ModelConfig, mesh: Mesh) -> None:
    """Checks that the recipe and the adapters of a run fit the model, sharded over a mesh.

    Raises:
        ValueError: if they do not; the message names the module, layers, format or projection that does not fit.
    """
    with jax.set_mesh(mesh):
        if config.adapters is None:
            like = abstract_model(lambda rngs: build(model, rngs=rngs))
            for recipe in recipes_of(config.recipe):
                explain(like, recipe)
        else:
            abstract_model(lambda rngs: config.adapt(build(model, rngs=rngs), rngs))


def start_from(directory: Path, state_like: Any, tokenizer: str | None) -> tuple[dict[str, Any], Origin]:
    """Returns the evaluation weights of the latest step in a directory, with the shardings of a state's parameters, and
    their origin.

    The origin keeps its tokenizer only if the run's text is read with it; otherwise, a message says what is left out.

    Args:
        directory: the directory of the checkpoints.
        state_like: the shapes and shardings of the run's state.
        tokenizer: the `tokenizer` of the run's configuration; `None` if it is the model's own.
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
            f"gtp-jax train: the tokenizer of {where} is not stored in this run's checkpoints, because it may differ "
            f"from the one that the text is read with ({text}): {', '.join(origin.files)}. Token ids in its "
            "config.json become null. To keep them, remove --tokenizer.",
            file=sys.stderr,
            flush=True,
        )
    return params, origin.without_tokenizer()


def take_codes_from(directory: Path, model: nnx.Module) -> None:
    """Replaces the codes of a model's frozen weights by those that the latest step in a directory holds; see
    `take_stored_codes`."""
    checkpoints = _open(directory)
    take_stored_codes(model, checkpoints, checkpoints.manifest())


def _is_of(origin: Origin, tokenizer: str) -> bool:
    """Returns whether the tokenizer that `--tokenizer` names is the one in a model's origin."""
    theirs = origin.files.get(TOKENIZER_FILE)
    return tokenizer != BYTE_TOKENS and theirs is not None and same_tokenizer(tokenizer, theirs)


def _open(directory: Path) -> Checkpoints:
    return Checkpoints(checkpoints_in(directory.expanduser()), read_only=True)
