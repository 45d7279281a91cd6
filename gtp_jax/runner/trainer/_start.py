"""Checks and reads what a run starts from: parameters, unless they are random, and a recipe that fits the model."""

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
from ...models import TOKENIZER_FILE, ModelConfig, Origin, build, saved_architecture
from ...nn import abstract_model
from ...ops import check_ids
from ..data import Corpus, same_tokenizer
from ..flags import Quantization
from ._start_flags import flags_for
from ._train_flags import TrainConfig

# Process 0 sends this instead of a size that it could not read.
_UNREADABLE = -1


def vocab_size_of(config: TrainConfig, corpus: Corpus, run: Path | None) -> int:
    """Returns how many tokens the model of a run has to know. Every process must call this.

    Those of its tokenizer; but a model that the run goes on with has its vocabulary already, and so has one that it
    starts from together with its tokenizer, which may know more tokens than the model, as published ones do.

    Args:
        config: the run's configuration.
        corpus: the text.
        run: the run's checkpoints, if it is resumed.

    Raises:
        ValueError: if the run starts with a text that has a token which its model lacks.
    """
    if run is not None and (size := _saved_vocab_size(Checkpoints(run, read_only=True))) is not None:
        return size
    gone = run is not None and config.from_ is not None and not Path(config.from_).expanduser().is_dir()
    if config.from_ is None or gone:  # a run whose snapshots are in memory alone does not need it any more
        return corpus.vocab_size
    checkpoints = _open(Path(config.from_))
    size = _saved_vocab_size(checkpoints)
    if size is None or size >= corpus.vocab_size:
        return corpus.vocab_size
    if not _is_of(_origin(checkpoints, checkpoints.manifest(), config.from_), config.tokenizer):
        return corpus.vocab_size
    try:
        for stream in (corpus.train, corpus.held_out):
            check_ids(stream, size, name=f"tokens of {corpus.name} by {corpus.tokenizer}")
    except ValueError as error:
        raise ValueError(
            f"{error} The tokenizer of the checkpoint in {config.from_} knows more tokens than its model. Leave out "
            "the text that has them; without a special end-of-text token, there is one more after every document."
        ) from None
    return size


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


def _origin(checkpoints: Checkpoints, content: Mapping[str, Any], where: str) -> Origin:
    """Returns the origin of the step of a manifest."""
    return Origin.of(content["extra"], checkpoints.files(content["step"]), where)


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
            + f"\n{flags_for(theirs, ours)}"
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
    origin = _origin(checkpoints, content, where)
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
