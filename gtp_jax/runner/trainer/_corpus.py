"""The text of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..data import STREAM, Corpus, Evaluated, Tokenizer, load_corpus, load_evaluated, read_text
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
    """
    tokenizer = tokenizer_of(config, resume=resume)
    out = RunDirectory.of(config.out).root.resolve()
    for path in config.data:
        if Path(path).resolve() == out:
            raise ValueError(
                f"`data` {path} is `out` too, and what a run writes is no text to train on. Give another --out; it may "
                "be a directory in that of the text."
            )
    text = read_text(
        config.data,
        follow_links=config.follow_links,
        is_run=lambda directory: directory.resolve() == out or RunDirectory(directory).is_of_run,
    )
    texts = tuple(_evaluated(path, config, tokenizer) for path in dict.fromkeys(config.eval_data))
    corpus = dataclasses.replace(load_corpus(text, tokenizer), packing=config.packing or STREAM, evaluated=texts)
    corpus.check(batch=config.batch, seq=config.seq)
    return corpus


def _evaluated(path: str, config: TrainConfig, tokenizer: Tokenizer) -> Evaluated:
    """Returns a text of `eval_data` as tokens.

    Raises:
        ValueError: if it cannot be read.
    """
    try:
        return load_evaluated(read_text([path], follow_links=config.follow_links), tokenizer)
    except ValueError as error:
        raise ValueError(str(error).replace("`data`", "`eval_data`")) from error
