"""Computes the loss that a model must beat: the entropy of single tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_PIECE = 1 << 20


def unigram_entropy(train: Sequence[np.ndarray], held_out: Sequence[np.ndarray], vocab_size: int) -> float:
    """Returns the mean loss, in nats a token, on the streams `held_out` of a model that knows how often each token
    occurs in those of `train`.

    It is the loss of the best guess that ignores context. Every token is counted once more than it occurs, so that one
    that is new in `held_out` costs a finite amount.
    """
    counts = _counts(train, vocab_size) + 1
    costs = math.log(counts.sum()) - np.log(counts)
    counted = _counts(held_out, vocab_size)
    return float(counted @ costs / counted.sum())


def _counts(streams: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    # in pieces, because bincount converts its whole input to 64-bit integers
    pieces = (tokens[start : start + _PIECE] for tokens in streams for start in range(0, len(tokens), _PIECE))
    return sum((np.bincount(piece, minlength=vocab_size) for piece in pieces), np.zeros(vocab_size, np.int64))


def bits_per_byte(loss: float, bytes_per_token: float = 1.0) -> float:
    """Returns a loss in nats a token, in bits a byte of text: comparable between tokenizers."""
    return loss / math.log(2) / bytes_per_token
