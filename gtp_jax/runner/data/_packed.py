"""Packs documents into rows, in which no document attends to another. The index depends only on their lengths."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import weakref
from typing import NamedTuple

import numpy as np

from ._documents import Documents
from ._rows import Rows


@dataclasses.dataclass(frozen=True, eq=False)
class Packed(Rows):
    """Rows of `seq` tokens that hold whole documents, or pieces of longer ones, each with a segment id.

    A document of `n` tokens takes `n - 1` places, because its last token is only a target. Its first token is never a
    target; every other token is predicted exactly once per epoch. The rest of a row is padding, which has a segment id
    of its own and no targets. Documents are placed by best fit, the longest first (see `best_fit`).

    Attributes:
        documents: the documents to pack.
        seq: the number of places per row.
        seed: the seed of the order.
        repeat: whether the rows continue after the first epoch.

    Raises:
        ValueError: if `seq` is less than 1, or no document has two tokens.
    """

    documents: Documents
    seq: int
    seed: int = 0
    repeat: bool = True

    def __post_init__(self) -> None:
        if self.seq < 1:
            raise ValueError(f"`seq` is {self.seq}; it must be a whole number of at least 1.")
        if not len(_index_of(self.documents, self.seq).starts):
            raise ValueError(f"too few tokens: none of the {len(self.documents)} documents has two.")

    def __len__(self) -> int:
        return len(_index_of(self.documents, self.seq).begins) - 1

    @property
    def kinds(self) -> dict[str, type]:
        return {**super().kinds, "segment_ids": np.int32}

    @property
    def digest(self) -> str:
        """A digest of the index: equal if rows hold the same pieces in the same places."""
        digest = hashlib.blake2b(f"{self.seq}".encode(), digest_size=16)
        for array in _index_of(self.documents, self.seq):
            digest.update(array.astype("<i8"))
        return digest.hexdigest()

    def cut(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        shape = (len(numbers), self.seq)
        tokens, targets, segments = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
        source, answers, index = self.documents.tokens, self.documents.answers, _index_of(self.documents, self.seq)
        for row, number in enumerate(numbers):
            place, (first, last) = 0, index.begins[number : number + 2]
            for segment, (start, size) in enumerate(
                zip(index.starts[first:last].tolist(), index.sizes[first:last].tolist(), strict=True)
            ):
                here = slice(place, place + size)
                tokens[row, here] = source[start : start + size]
                targets[row, here] = source[start + 1 : start + size + 1]
                if answers is not None:
                    targets[row, here][answers[start + 1 : start + size + 1] == 0] = -1
                segments[row, here] = segment
                place += size
            segments[row, place:] = last - first
        return {"tokens": tokens, "targets": targets, "segment_ids": segments}


class _Index(NamedTuple):
    """The pieces of documents that make each row.

    Attributes:
        starts: `(P,)` int64, the first token of each piece, in the order of rows.
        sizes: `(P,)` int64, the number of places of each piece.
        begins: `(R + 1,)` int64, the first piece of each row, and finally the number of all pieces.
    """

    starts: np.ndarray
    sizes: np.ndarray
    begins: np.ndarray


# The index of each `Documents` that is alive, by `seq`. It is made once and serves all `Packed` of those documents.
_INDICES: weakref.WeakKeyDictionary[Documents, dict[int, _Index]] = weakref.WeakKeyDictionary()


def _index_of(documents: Documents, seq: int) -> _Index:
    indices = _INDICES.setdefault(documents, {})
    if seq not in indices:
        starts, sizes = _pieces(documents.offsets, seq)
        rows = best_fit(sizes, seq)
        order = np.argsort(rows, kind="stable")
        indices[seq] = _Index(starts[order], sizes[order], np.append(0, np.cumsum(np.bincount(rows))))
    return indices[seq]


def _pieces(offsets: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits documents into pieces as long as a row, and what remains of each.

    Returns the first token and the number of places of each piece, int64, in the order of the documents.
    """
    places = np.maximum(np.diff(offsets) - 1, 0)
    counts = -(-places // seq)
    document = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    return offsets[document] + number * seq, np.minimum(seq, places[document] - number * seq)


def best_fit(sizes: np.ndarray, room: int) -> np.ndarray:
    """Puts pieces into rows by best fit: the longest first, each into the row in which it leaves the least room.

    All pieces of one size are placed together, into the rows that have the same room left. This takes about three array
    operations per size and room, for any number of pieces.

    Args:
        sizes: `(P,)`, the size of each piece, from 1 to `room`.
        room: the size of a row.

    Returns:
        `(P,)` int64, the row of each piece; rows are numbered from 0 without gaps.
    """
    found = np.empty(len(sizes), np.int64)
    order = np.argsort(-sizes, kind="stable")
    distinct, begins = np.unique(-sizes[order], return_index=True)
    rooms: list[int] = []  # the distinct amounts of room left in rows, ascending
    rows_with: dict[int, list[np.ndarray]] = {}
    count = 0

    def leave(left: int, rows: np.ndarray) -> None:
        if left and len(rows):
            if left not in rows_with:
                bisect.insort(rooms, left)
                rows_with[left] = []
            rows_with[left].append(rows)

    groups = np.split(order, begins[1:]) if len(order) else []
    for size, pieces in zip((-distinct).tolist(), groups, strict=True):
        while len(pieces):
            at = bisect.bisect_left(rooms, size)
            if at < len(rooms):
                space = rooms.pop(at)
                rows = np.concatenate(rows_with.pop(space))
            else:
                space = room
                rows = np.arange(count, count - (-len(pieces) // (room // size)))
                count += len(rows)
            each = space // size
            taken = min(len(pieces), each * len(rows))
            used = -(-taken // each)
            found[pieces[:taken]] = np.repeat(rows[:used], each)[:taken]
            leave(space, rows[used:])
            leave(space - each * size, rows[: used - 1])
            leave(space - (taken - (used - 1) * each) * size, rows[used - 1 : used])
            pieces = pieces[taken:]
    return found
