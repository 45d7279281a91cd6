"""The text of a run."""

from __future__ import annotations

from pathlib import Path

from ..data import BYTES, Corpus, load_corpus, load_tokenizer, read_text
from ._directory import RunDirectory
from ._train_flags import TrainConfig


def read_corpus(config: TrainConfig) -> Corpus:
    """Returns the text that a configuration names, as tokens; without the files of runs, this one's included, so that
    it is the same when the run is resumed.

    Raises:
        ValueError: if there is too little of it, or it or the tokenizer cannot be read.
    """
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else BYTES
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
