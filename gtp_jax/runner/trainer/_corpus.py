"""The text of a run."""

from __future__ import annotations

from pathlib import Path

from ..data import Corpus, load_corpus, read_text
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
    corpus = load_corpus(text, tokenizer)
    corpus.check(batch=config.batch, seq=config.seq)
    return corpus
