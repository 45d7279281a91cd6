"""Counts documents that one source holds out and another trains on."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ._corpus import Source
from ._documents import Documents

# An odd number, so that lengths and sums are mixed by a bijection of 64 bits.
_MIX = np.uint64(0x9E3779B97F4A7C15)


def copies(sources: Sequence[Source]) -> Iterator[tuple[Source, Source, int]]:
    """Counts the documents that one source holds out and another trains on, with the same tokens.

    Reads all tokens once, to compare the lengths and sums of documents, and then only the documents for which both are
    equal.

    Yields:
        The source that holds documents out, the source that trains on them, and their number, for each pair of sources
        that has any.
    """
    if len(sources) < 2:
        return
    held_out = [_keys(one.held_out) for one in sources]
    trained = [_keys(one.train) for one in sources]
    known = [np.unique(keys) for keys in trained]
    for one, other in itertools.permutations(range(len(sources)), 2):
        own, theirs = held_out[one], known[other]
        common = own[np.searchsorted(theirs, own, "right") > np.searchsorted(theirs, own)]
        found = set(_digests(sources[other].train, trained[other], common))
        if count := sum(digest in found for digest in _digests(sources[one].held_out, own, common)):
            yield sources[one], sources[other], count


def _keys(parts: Sequence[Documents]) -> np.ndarray:
    """Returns a key of each document that has tokens, `(documents,)` uint64: equal documents have equal keys."""
    keys = [np.zeros(0, np.uint64)]
    for part in parts:
        begins, lengths = _places(part)
        if len(begins):
            sums = np.add.reduceat(part.tokens, begins, dtype=np.uint64)
            keys.append(sums * _MIX + lengths.astype(np.uint64))
    return np.concatenate(keys)


def _places(documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    """Returns the index of the first token, and the length, of each document that has tokens."""
    lengths = np.diff(documents.offsets)
    return documents.offsets[:-1][lengths > 0], lengths[lengths > 0]


def _digests(parts: Sequence[Documents], keys: np.ndarray, common: np.ndarray) -> Iterator[bytes]:
    """Yields a digest of each document whose key is in `common`."""
    if not len(common):
        return
    first = 0
    for part in parts:
        begins, lengths = _places(part)
        own = keys[first : first + len(begins)]
        first += len(begins)
        for place in np.flatnonzero(np.isin(own, common)):
            tokens = part.tokens[begins[place] : begins[place] + lengths[place]]
            yield hashlib.blake2b(tokens.astype(np.int64), digest_size=16).digest()
