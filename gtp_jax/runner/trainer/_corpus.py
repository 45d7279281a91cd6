"""The text of a run."""

from __future__ import annotations

from ..data import BYTES, Corpus, load_corpus, load_tokenizer, read_text
from ._train_flags import TrainConfig


def read_corpus(config: TrainConfig) -> Corpus:
    """Returns the text that a configuration names, as tokens.

    Raises:
        ValueError: if there is too little of it, or it or the tokenizer cannot be read.
    """
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else BYTES
    corpus = load_corpus(read_text(config.data, follow_links=config.follow_links), tokenizer)
    corpus.check(batch=config.batch, seq=config.seq)
    return corpus
