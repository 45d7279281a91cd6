"""The text of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..data import (
    DOCUMENTS,
    STREAM,
    Corpus,
    Evaluated,
    Text,
    Tokenizer,
    load_evaluated,
    load_source,
    read_text,
    weighted,
)
from ._directory import RunDirectory
from ._tokenizer import tokenizer_of
from ._train_flags import TrainConfig


def read_corpus(config: TrainConfig, *, resume: bool = False) -> Corpus:
    """Returns the text that a configuration names, as tokens; without the files of runs, this one's included, so that
    it is the same when the run is resumed.

    Args:
        config: of the run.
        resume: it goes on.

    Raises:
        ValueError: if there is too little of it, or it or the tokenizer cannot be read.
        ModuleNotFoundError: if a package that reads it is not installed.
    """
    tokenizer = tokenizer_of(config, resume=resume)
    out = RunDirectory.of(config.out).root.resolve()
    paths = weighted(config.data)
    for path, _ in paths:
        if Path(path).resolve() == out:
            raise ValueError(
                f"`data` {path} is `out` too, and what a run writes is no text to train on. Give another --out; it may "
                "be a directory in that of the text."
            )

    def read(*names: str) -> Text:
        return read_text(
            names,
            text_field=config.text_field,
            follow_links=config.follow_links,
            is_run=lambda directory: directory.resolve() == out or RunDirectory(directory).is_of_run,
        )

    mixed = [(read(path), weight) for path, weight in paths if weight is not None]
    whole = mixed or [(read(*(path for path, _ in paths)), 1.0)]
    texts = [text for text, _ in whole]
    corpus = Corpus(
        texts[0].name if len(texts) == 1 else f"{texts[0].name} and {len(texts) - 1} more",
        tokenizer,
        tuple(load_source(text, tokenizer, token_dtype=config.token_dtype, weight=weight) for text, weight in whole),
        config.packing or (DOCUMENTS if any(text.records for text in texts) else STREAM),
        tuple(one for text in texts for one in text.unread),
        tuple(_evaluated(path, config, tokenizer) for path in dict.fromkeys(config.eval_data)),
    )
    corpus.check(batch=config.batch, seq=config.seq)
    return corpus


def _evaluated(path: str, config: TrainConfig, tokenizer: Tokenizer) -> Evaluated:
    """Returns a text of `eval_data` as tokens.

    Raises:
        ValueError: if it cannot be read.
    """
    given: dict[str, Any] = {"text_field": config.text_field, "follow_links": config.follow_links}
    try:
        return load_evaluated(read_text([path], **given), tokenizer, token_dtype=config.token_dtype)
    except ValueError as error:
        raise ValueError(str(error).replace("`data`", "`eval_data`")) from error
