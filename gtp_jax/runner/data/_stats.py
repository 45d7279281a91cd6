"""Computes the baseline loss that a model must beat: the unigram entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_PIECE = 1 << 20


def unigram_entropy(train: Sequence[np.ndarray], held_out: Sequence[np.ndarray], vocab_size: int) -> float:
    """Returns the mean loss on `held_out`, in nats per token, of a model that predicts token frequencies of `train`.

    This is the loss of the best prediction that ignores context. Each count is increased by one, so that a token that
    occurs only in `held_out` has a finite loss.
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
    """Converts a loss from nats per token to bits per byte of text, which is comparable between tokenizers."""
    return loss / math.log(2) / bytes_per_token
