"""Finds the tokenizer of a checkpoint's model, or of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoint import Checkpoints
from ...models import END_TOKEN, TOKENIZER_FILE, Origin, opened
from ..data import BYTES, Tokenizer, load_tokenizer, read_tokenizer
from ._directory import RunDirectory
from ._train_flags import BYTE_TOKENS, TrainConfig


def named_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer that `--tokenizer` names: a file, or bytes."""
    return BYTES if name == BYTE_TOKENS else load_tokenizer(name)


def name_of_tokenizer(source: Path, origin: Origin) -> str | None:
    """Returns the value of `--tokenizer` for a checkpoint's model; `None` if the checkpoint holds the tokenizer.

    Args:
        source: the directory of a run, or of an import.
        origin: the origin of the checkpoint.

    Raises:
        ValueError: if the tokenizer is unknown, or its file does not exist.
    """
    if TOKENIZER_FILE in origin.files:
        return None
    if origin.of_bytes:
        return BYTE_TOKENS
    run = RunDirectory.around(source)
    name = TrainConfig.load(run.config).tokenizer if run.is_of_run else None
    if name is None and (origin.config or not run.is_of_run):
        raise ValueError(
            f"{source} does not say what its tokens are. Give the tokenizer.json that belongs to the model as "
            f"--tokenizer, or use --tokenizer {BYTE_TOKENS} if every byte is a token."
        )
    name = name or BYTE_TOKENS
    if name != BYTE_TOKENS and not Path(name).is_file():
        raise ValueError(
            f"the run in {run.root} was trained with the tokenizer {name}, which does not exist. Give it as "
            "--tokenizer."
        )
    return name


def stored_tokenizer(source: Path, origin: Origin) -> Tokenizer:
    """Returns the tokenizer of a checkpoint's model.

    Args:
        source: the directory of a run, or of an import.
        origin: the origin of the checkpoint.

    Raises:
        ValueError: if the tokenizer is unknown, or cannot be read.
    """
    name = name_of_tokenizer(source, origin)
    return _held(origin, str(source)) if name is None else named_tokenizer(name)


def tokenizer_of(config: TrainConfig, *, resume: bool) -> Tokenizer:
    """Returns the tokenizer of a run: the one that is named, the one of the model that it starts from, or bytes.

    Args:
        config: the configuration of the run.
        resume: whether the run is resumed. Its own checkpoints, if there are any, then determine the tokenizer.

    Raises:
        FileNotFoundError: if there is neither a checkpoint of the run nor the one that it started from.
        ValueError: if the tokenizer cannot be read.
    """
    if config.tokenizer is not None:
        return named_tokenizer(config.tokenizer)
    if config.from_ is None:
        return BYTES
    if resume and (origin := own_origin(config)) is not None:
        return _held(origin, config.out) if TOKENIZER_FILE in origin.files else BYTES
    if resume and not Path(config.from_).expanduser().is_dir():
        raise FileNotFoundError(
            f"the run in {config.out} has saved no step, and {config.from_}, whose tokenizer it uses, does not "
            "exist. Give the tokenizer.json as --tokenizer."
        )
    return stored_tokenizer(Path(config.from_).expanduser(), origin_of_start(config.from_))


def origin_of_start(source: str) -> Origin:
    """Returns the origin of the model that a run starts from."""
    _, checkpoints = opened(source)
    return read_origin(checkpoints, checkpoints.manifest())


def read_origin(checkpoints: Checkpoints, content: Mapping[str, Any]) -> Origin:
    """Returns the origin of the step of a manifest, which only this process reads."""
    step = content["step"]
    return Origin.of(content["extra"], checkpoints.files(step, together=False), f"the checkpoint of step {step}")


def _held(origin: Origin, where: str) -> Tokenizer:
    """Returns the tokenizer that a checkpoint holds; the publisher's end-of-text token separates documents."""
    named = origin.config.get(END_TOKEN)
    end = next((token for token in (named if isinstance(named, list) else [named]) if isinstance(token, int)), None)
    return read_tokenizer(origin.files[TOKENIZER_FILE], where, end)


def own_origin(config: TrainConfig) -> Origin | None:
    """Returns the origin of a run's latest step that is not damaged; `None` if there is no step."""
    directory = RunDirectory.of(config.out).checkpoints
    if not directory.is_dir():
        return None
    checkpoints = Checkpoints(directory, read_only=True)
    failure: Exception | None = None
    for step in reversed(checkpoints.steps()):
        try:
            return read_origin(checkpoints, checkpoints.manifest(step))
        except (ValueError, FileNotFoundError, KeyError) as error:  # skips the step, like restoring the state does
            failure = failure or error
    if failure is not None:
        raise failure
    return None
