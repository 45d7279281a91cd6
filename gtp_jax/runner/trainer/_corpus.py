"""The text of a run."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..data import (
    DOCUMENTS,
    STREAM,
    Corpus,
    Text,
    copies,
    load_evaluated,
    load_source,
    read_text,
    suffix_of,
    weighted,
)
from ._chat import chat_of
from ._directory import RunDirectory
from ._tokenizer import tokenizer_of
from ._train_flags import TrainConfig


def read_corpus(config: TrainConfig, *, resume: bool = False) -> Corpus:
    """Returns the text that a configuration names, as tokens.

    Skips the directories of runs, including this one, so that a resumed run reads the same text.

    Args:
        config: the configuration of the run.
        resume: whether the run is resumed.

    Raises:
        ValueError: if there is too little text, or the text or the tokenizer cannot be read.
        ModuleNotFoundError: if a package that is needed to read the text is not installed.
    """
    tokenizer = tokenizer_of(config, resume=resume)
    out = RunDirectory.of(config.out).root.resolve()
    paths = weighted(config.data)
    for path, _ in paths:
        if Path(path).resolve() == out:
            raise ValueError(
                f"`data` {path} is also `out`, so the run would train on its own output. Choose another --out; it "
                "may be a subdirectory of `data`."
            )

    def read(*names: str) -> Text:
        return read_text(
            names,
            text_field=config.text_field,
            follow_links=config.follow_links,
            is_run=lambda directory: directory.resolve() == out or RunDirectory(directory).is_of_run,
        )

    _check_apart([Path(path) for path, weight in paths if weight is not None])
    mixed = [(read(path), weight) for path, weight in paths if weight is not None]
    whole = mixed or [(read(*(path for path, _ in paths)), 1.0)]
    texts = [text for text, _ in whole]
    evaluated = [_evaluated(path, config) for path in dict.fromkeys(config.eval_data)]
    chat = None
    if any(text.chat_files for text in (*texts, *evaluated)):
        chat = chat_of(config, tokenizer, resume=resume)
    elif config.chat_template is not None:
        raise ValueError(
            "`chat_template` is given, but no `data` contains conversations, which are JSON lines with `messages`. "
            "Remove --chat-template, or give conversations."
        )
    if config.token_dtype is not None and not any(
        suffix_of(file) == ".bin" for text in (*texts, *evaluated) for file in text.token_files
    ):
        raise ValueError(
            "`token_dtype` is given, but no `data` is a `.bin` file. Remove --token-dtype; no other format needs it."
        )
    options: dict[str, Any] = {"token_dtype": config.token_dtype, "chat": chat}
    corpus = Corpus(
        texts[0].name if len(texts) == 1 else f"{texts[0].name} and {len(texts) - 1} more",
        tokenizer,
        tuple(load_source(text, tokenizer, weight=weight, **options) for text, weight in whole),
        config.packing or (DOCUMENTS if any(text.records or text.chat_files for text in texts) else STREAM),
        tuple(one for text in texts for one in text.unread),
        tuple(_of_evaluated(load_evaluated, text, tokenizer, **options) for text in evaluated),
        chat,
    )
    corpus.check(batch=config.batch, seq=config.seq)
    _warn_of_cuts(corpus, config.seq)
    _warn_of_short_files(corpus, config.seq)
    _warn_of_copies(corpus)
    return corpus


def _check_apart(paths: Sequence[Path]) -> None:
    """Refuses weighted paths of which one contains another: each is split by itself, and a document that one holds out
    would be trained on in the other.

    Raises:
        ValueError: naming both.
    """
    places = [path.resolve() for path in paths]
    for (path, place), (other, inner) in itertools.permutations(zip(paths, places, strict=True), 2):
        if inner.is_relative_to(place):
            raise ValueError(
                f"`data` {other} is inside {path}, and both have a weight, so text that one of them holds out would "
                "be trained on in the other. Move it elsewhere, or remove the weights."
            )


def _warn_of_short_files(corpus: Corpus, seq: int) -> None:
    """Warns of files of token ids that are too short for a row, which a stream leaves out."""
    short = [one for one in corpus.train if len(one.tokens) <= seq]
    if short and corpus.packing == STREAM:
        warnings.warn(
            f"{len(short)} of {len(corpus.train)} files have at most `seq` = {seq} tokens, too few for a row, and "
            "are left out. Pass --packing documents or a smaller --seq, or join them.",
            stacklevel=3,
        )


def _warn_of_copies(corpus: Corpus) -> None:
    """Warns of documents that one source holds out and another trains on: each source is split by itself."""
    for one, other, count in copies(corpus.sources):
        warnings.warn(
            f"{count} of {sum(map(len, one.held_out))} documents that {one.name} holds out are also trained on, in "
            f"{other.name}, so the held-out loss is too low. Remove them from one of the two.",
            stacklevel=3,
        )


def _warn_of_cuts(corpus: Corpus, seq: int) -> None:
    """Warns of conversations that are longer than a row: they are cut, and the parts do not see each other."""
    lengths = np.concatenate([np.diff(one.offsets) for one in corpus.train if one.answers is not None] or [[]])
    if longer := int((lengths > seq + 1).sum()):
        warnings.warn(
            f"{longer} of {len(lengths)} conversations are longer than `seq` = {seq} and are cut; text after a cut "
            f"does not attend to text before it. The longest has {int(lengths.max())} tokens. Increase --seq, or "
            "remove these conversations.",
            stacklevel=3,
        )


def _evaluated(path: str, config: TrainConfig) -> Text:
    """Returns a text of `eval_data`.

    Raises:
        ValueError: if it cannot be read.
    """
    return _of_evaluated(read_text, [path], text_field=config.text_field, follow_links=config.follow_links)


def _of_evaluated[T](read: Callable[..., T], *args: Any, **options: Any) -> T:
    """Calls a function on a text of `eval_data`, and makes its errors name `eval_data` instead of `data`."""
    try:
        return read(*args, **options)
    except ValueError as error:
        raise ValueError(str(error).replace("`data`", "`eval_data`")) from error
