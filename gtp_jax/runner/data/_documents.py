"""Documents as tokens: one array, and where each document ends."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """Concatenated documents, in host memory or mapped from a file.

    Attributes:
        tokens: `(tokens,)` integers, the tokens of all documents.
        offsets: `(documents + 1,)` int64: document `d` has the tokens `offsets[d]` to `offsets[d + 1]`, exclusive.
        answers: `(tokens,)` uint8: 1 for a token that the loss counts as a target, 0 for one that it leaves out. By
            default, all count.

    Raises:
        ValueError: if `offsets` do not cover the tokens in order, or `answers` do not have one uint8 per token.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    answers: np.ndarray | None = None

    def __post_init__(self) -> None:
        offsets = self.offsets
        if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(self.tokens) or (np.diff(offsets) < 0).any():
            raise ValueError(
                f"`offsets` {np.array2string(offsets, threshold=6)} do not cover {len(self.tokens)} tokens; they must "
                "increase from 0 to the number of tokens."
            )
        if self.answers is not None and (self.answers.shape, self.answers.dtype) != (self.tokens.shape, np.uint8):
            raise ValueError(
                f"`answers` are {self.answers.dtype} of shape {self.answers.shape}; they must be uint8, one for each "
                f"of the {len(self.tokens)} tokens."
            )

    @classmethod
    def of(
        cls, documents: Iterable[np.ndarray], dtype: np.dtype, answers: Iterable[np.ndarray] | None = None
    ) -> Documents:
        """Concatenates documents.

        Args:
            documents: the tokens of each document.
            dtype: the dtype of the concatenated tokens, which must hold every id.
            answers: the `answers` of each document, if the loss leaves some tokens out.
        """
        parts = [np.asarray(document).astype(dtype) for document in documents]
        offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        masks = None if answers is None else _joined([np.asarray(one) for one in answers], np.dtype(np.uint8))
        return cls(_joined(parts, dtype), offsets, masks)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counted(self) -> np.ndarray:
        """The tokens that the loss counts, in their order."""
        return self.tokens if self.answers is None else self.tokens[self.answers == 1]


def fingerprint(*documents: Documents, more: str = "") -> str:
    """Returns a digest of the tokens, of which ones the loss counts, and of `more`: equal if all of these are equal.

    The digest does not depend on where documents end: see `Packed.digest`.
    """
    digest = hashlib.blake2b(more.encode(), digest_size=16)
    for one in documents:
        for array in (one.tokens, one.answers):
            if array is not None:
                digest.update(f"{len(array)} {array.dtype.str}".encode())
                digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def _joined(parts: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
