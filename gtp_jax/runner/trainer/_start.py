"""Checks and reads what a run starts from: parameters, unless they are random, and a recipe that fits the model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from .._foreign import brief
from ..checkpoint import Checkpoints
from ..data import same_tokenizer
from ..models import PRESETS, TOKENIZER_FILE, ModelConfig, Origin, build, saved_architecture
from ..nn import abstract_model, explain
from ..recipes import Quantization
from ._directory import checkpoints_in
from ._train_flags import VOCAB_MULTIPLE, vocab_size_with

# Fields of an architecture that flags other than --preset decide.
_OF_OTHER_FLAGS = {"vocab_size", "top_k", "shared_hidden", "routing"}
_OWN_PROGRAM = (
    "Train it in a program of your own: `gtp_jax.models.saved_config` makes its configuration of the manifest's "
    "`extra`, and `Checkpoints.restore_params` reads its parameters."
)


def check_start(directory: Path, model: ModelConfig) -> None:
    """Checks that a checkpoint is of a model.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: if it is of another model, naming what differs, or does not say of which.
    """
    try:
        theirs = saved_architecture(_open(directory).manifest()["extra"])
    except (KeyError, TypeError):
        raise ValueError(
            f"the checkpoint in {directory} does not say of which model it is, so that a run cannot start from it. "
            "Take one that `gtp-jax train` or `gtp-jax convert import` of this version has written."
        ) from None
    ours = model.architecture()
    lines = [
        f"  {name}: {theirs.get(name)} there, {ours.get(name)} here"
        for name in {**ours, **theirs}
        if theirs.get(name) != ours.get(name)
    ]
    if lines:
        raise ValueError(
            f"the checkpoint in {directory} is of another model than this run's:\n"
            + "\n".join(lines)
            + f"\n{_remedy(theirs)}"
        )


def _remedy(theirs: Mapping[str, Any]) -> str:
    """Returns which flags make a run of a model of this architecture, or that none do."""

    def sizes(architecture: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in architecture.items() if name not in _OF_OTHER_FLAGS}

    fitting = {name: preset for name, preset in PRESETS.items() if sizes(preset.architecture()) == sizes(theirs)}
    if not fitting:
        return f"No --preset has the sizes of the checkpoint's, and `gtp-jax train` trains no others. {_OWN_PROGRAM}"
    name, preset = next(iter(fitting.items()))
    vocab_size = theirs.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size_with(preset, vocab_size) != vocab_size:
        return (
            f"--preset {name} has its other sizes, but no --tokenizer gives it {brief(vocab_size)} tokens: `gtp-jax "
            f"train` takes {preset.vocab_size}, or a larger multiple of {VOCAB_MULTIPLE}. {_OWN_PROGRAM}"
        )
    least = vocab_size - VOCAB_MULTIPLE + 1 if vocab_size > preset.vocab_size else 1
    return (
        f"Choose --preset {name}, and the --tokenizer that belongs to it; of its kind are those with {least} to "
        f"{vocab_size} tokens, their separator included."
    )


def check_recipe_fits(quantization: Quantization, model: ModelConfig, mesh: Mesh) -> None:
    """Checks that a model, sharded over a mesh, has what a recipe names.

    Raises:
        ValueError: naming the module, the layers or the format that do not fit.
    """
    with jax.set_mesh(mesh):
        explain(abstract_model(lambda rngs: build(model, rngs=rngs)), quantization.to_recipe())


def start_from(directory: Path, state_like: Any, tokenizer: str | None) -> tuple[dict[str, Any], Origin]:
    """Returns the parameters of the latest step there, on the shardings of a state's, and their origin.

    The origin keeps its tokenizer only if it is the one that the run's text is read with; otherwise a message says what
    is left out.

    Args:
        directory: the checkpoints.
        state_like: shapes and shardings of the run's state.
        tokenizer: the run's tokenizer.json; `None` if bytes are the tokens.
    """
    checkpoints = _open(directory)
    content = checkpoints.manifest()
    step, where = content["step"], f"the checkpoint in {directory}"
    params = checkpoints.restore_params(state_like, step)
    origin = Origin.of(content["extra"], checkpoints.files(step), where)
    if not origin.has_tokenizer or _is_of(origin, tokenizer):
        return params, origin
    if jax.process_index() == 0:
        text = "its tokens are bytes" if tokenizer is None else f"`tokenizer` {tokenizer}"
        print(
            f"gtp-jax train: the tokenizer of {where} is left out of this run's checkpoints, because it is not shown "
            f"to be the one that the text is read with ({text}): {', '.join(origin.files)}. The ids of tokens in its "
            "config.json become null. To keep them, give the tokenizer.json that belongs to it as --tokenizer.",
            file=sys.stderr,
            flush=True,
        )
    return params, origin.without_tokenizer()


def _is_of(origin: Origin, tokenizer: str | None) -> bool:
    """Returns whether a run's tokenizer is that of a model."""
    theirs = origin.files.get(TOKENIZER_FILE)
    return tokenizer is not None and theirs is not None and same_tokenizer(tokenizer, theirs)


def _open(directory: Path) -> Checkpoints:
    return Checkpoints(checkpoints_in(directory.expanduser()), read_only=True)
