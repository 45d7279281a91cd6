"""Lets a language model write text while it is trained."""

from __future__ import annotations

import numpy as np

from ...generation import generate
from ...models import ModelConfig
from ...train import TrainState
from ..data import Corpus, Documents
from ._train_flags import TrainConfig

# The number of tokens of the first held-out document that the model continues, and the sampling temperature.
_PROMPT_TOKENS = 24
_TEMPERATURE = 0.8


def sample(config: TrainConfig, model: ModelConfig, corpus: Corpus, state: TrainState) -> str:
    """Returns how the model in this state continues the beginning of the held-out text. Every process must call this.

    Args:
        config: the configuration of the run.
        model: the configuration of the model.
        corpus: the text.
        state: the state.
    """
    tokenizer = corpus.tokenizer
    held_out = next(one for one in corpus.held_out if len(one.tokens))
    prompt = _begin(held_out, tokenizer.separator, config.seq)
    ending = [] if corpus.chat is None else [corpus.chat.template.ending]
    found = generate(
        state.model(),
        prompt[None],
        max_new_tokens=config.sample_tokens,
        stop=[tokenizer.separator, *ending],
        tokenizer=tokenizer,
        vocab_size=min(corpus.vocab_size, model.vocab_size),
        temperature=_TEMPERATURE,
        seed=config.seed,
    )
    new = found.tokens[0, : found.lengths[0]]
    return tokenizer.decode([*prompt.tolist(), *new.tolist()])


def _begin(documents: Documents, separator: int, most: int) -> np.ndarray:
    """Returns the beginning of the first document, `(tokens,)` int64.

    For a conversation, this is everything before its first answer, unless that is more than `most` tokens.
    """
    if documents.answers is not None and 0 < (first := int(documents.answers.argmax())) <= most:
        return np.asarray(documents.tokens[:first], np.int64)
    begin = np.asarray(documents.tokens[:_PROMPT_TOKENS], np.int64)
    ends = np.flatnonzero(begin == separator)
    return begin[: ends[0]] if ends.size and ends[0] else begin
