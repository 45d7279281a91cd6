"""Counts documents that are in two sets of documents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from ._documents import Documents

# An odd number, so that lengths and sums are mixed by a bijection of 64 bits.
_MIX = np.uint64(0x9E3779B97F4A7C15)


def copies(some: Sequence[Documents], others: Sequence[Documents]) -> int:
    """Returns the number of documents of `some` that are also among `others`, with the same tokens.

    Reads all tokens once, to compare lengths and sums, and then only the documents for which both are equal.
    """
    keys, known, none = [_keys(one) for one in some], [_keys(one) for one in others], np.zeros(0, np.uint64)
    common = np.intersect1d(np.concatenate([*keys, none]), np.concatenate([*known, none]))
    if not len(common):
        return 0
    found = set(_digests(others, known, common))
    return sum(digest in found for digest in _digests(some, keys, common))


def _keys(documents: Documents) -> np.ndarray:
    """Returns a key of each document that has tokens, `(documents,)` uint64: equal documents have equal keys."""
    begins, lengths = _places(documents)
    if not len(begins):
        return np.zeros(0, np.uint64)
    sums = np.add.reduceat(documents.tokens, begins, dtype=np.uint64)
    return sums * _MIX + lengths.astype(np.uint64)


def _places(documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first token and the length of each document that has tokens."""
    lengths = np.diff(documents.offsets)
    return documents.offsets[:-1][lengths > 0], lengths[lengths > 0]


def _digests(documents: Sequence[Documents], keys: Sequence[np.ndarray], common: np.ndarray) -> Iterator[bytes]:
    """Yields a digest of each document whose key is in `common`."""
    for one, own in zip(documents, keys, strict=True):
        begins, lengths = _places(one)
        for place in np.flatnonzero(np.isin(own, common)):
            tokens = one.tokens[begins[place] : begins[place] + lengths[place]]
            yield hashlib.blake2b(tokens.astype(np.int64), digest_size=16).digest()
