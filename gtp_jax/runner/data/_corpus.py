"""A corpus: two streams of tokens, one to train on and one held out."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from ._text import Text
from ._tokens import BYTES, Tokenizer


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """A text to evaluate on beside what is held out, in host memory.

    Attributes:
        name: of the text.
        tokens: token stream, documents separated.
        bytes_per_token: of the text.
    """

    name: str
    tokens: np.ndarray
    bytes_per_token: float

    @property
    def fingerprint(self) -> str:
        """Of the stream; equal where it is equal."""
        return _fingerprint(self.tokens)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens held out, in host memory.

    Attributes:
        name: of the text.
        tokenizer: that its tokens are of.
        vocab_size: number of different tokens.
        train: token stream, documents separated, in the smallest unsigned integer type.
        held_out: the same, of documents that are not in `train`.
        documents: number of documents of each.
        bytes_per_token: of the held-out text.
        fingerprint: of both streams; equal where they are equal.
        unread: what was left out of the text, which older versions of gtp_jax read.
        evaluated: further texts to evaluate on.
    """

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    train: np.ndarray
    held_out: np.ndarray
    documents: tuple[int, int]
    bytes_per_token: float
    fingerprint: str
    unread: tuple[str, ...] = ()
    evaluated: tuple[Evaluated, ...] = ()

    def check(self, *, batch: int, seq: int) -> None:
        """Checks that there is text for a batch.

        Raises:
            ValueError: if the train stream holds less than one batch, or another stream less than one sequence.
        """
        needed = batch * seq + 1
        if len(self.train) < needed:
            raise ValueError(
                f"too few tokens: {self.name} has {len(self.train)} to train on, but one batch of {batch} sequences "
                f"of {seq} needs {needed}. Give more text, or a smaller `batch` or `seq`."
            )
        if len(self.held_out) < seq + 1:
            raise ValueError(
                f"too few tokens: {self.name} has {len(self.held_out)} held out, but one sequence of {seq} needs "
                f"{seq + 1}. Give more text, or a smaller `seq`."
            )
        for text in self.evaluated:
            if len(text.tokens) < seq + 1:
                raise ValueError(
                    f"too few tokens: {text.name} of `eval_data` has {len(text.tokens)}, but one sequence of {seq} "
                    f"needs {seq + 1}. Leave it out, or give a smaller `seq`."
                )


def load_corpus(text: Text, tokenizer: Tokenizer = BYTES, *, held_out: float = 0.05) -> Corpus:
    """Splits text and turns it into tokens.

    Args:
        text: documents.
        tokenizer: how they become tokens.
        held_out: share of the text's bytes to hold out, at most.

    Raises:
        ValueError: if `held_out` is not between 0 and 1.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"`held_out` is {held_out}; it must be a share between 0 and 1.")
    kept, apart = split(text.documents, held_out)
    streams = [tokenizer.stream(side) for side in (kept, apart)]
    return Corpus(
        name=text.name,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        train=streams[0],
        held_out=streams[1],
        documents=(len(kept), len(apart)),
        bytes_per_token=_bytes_per_token(apart, streams[1]),
        fingerprint=_fingerprint(*streams),
        unread=text.unread,
    )


def load_evaluated(text: Text, tokenizer: Tokenizer) -> Evaluated:
    """Turns a text that is evaluated as a whole into tokens."""
    tokens = tokenizer.stream(text.documents)
    return Evaluated(text.name, tokens, _bytes_per_token(text.documents, tokens))


def _fingerprint(*streams: np.ndarray) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for stream in streams:
        digest.update(f"{len(stream)} {stream.dtype.str}".encode())
        digest.update(np.ascontiguousarray(stream))
    return digest.hexdigest()


def _bytes_per_token(documents: Sequence[bytes], tokens: np.ndarray) -> float:
    return (sum(map(len, documents)) + len(documents)) / max(1, len(tokens))


def split(documents: Sequence[bytes], held_out: float) -> tuple[list[bytes], list[bytes]]:
    """Documents to train on, in their order, and documents held out, in the order of the hash of their content.

    By content, so that a document's name and place do not matter and copies of it stay on one side. In the order of
    the hash documents are held out as long as the share is not exceeded. If it is too small for any document, the
    tail of each is held out instead, cut between two characters.
    """
    budget = held_out * sum(map(len, documents))
    copies: dict[bytes, int] = {}
    for document in documents:
        copies[document] = copies.get(document, 0) + 1
    apart: list[bytes] = []
    for document in sorted(copies, key=_hash):
        size = len(document) * copies[document]
        if size <= budget:
            budget -= size
            apart += [document] * copies[document]
    if apart:
        chosen = set(apart)
        return [document for document in documents if document not in chosen], apart
    cuts = [(document, _character(document, int(len(document) * (1 - held_out)))) for document in documents]
    return [document[:cut] for document, cut in cuts if cut], [document[cut:] for document, cut in cuts]


def _hash(document: bytes) -> bytes:
    return hashlib.blake2b(document, digest_size=16).digest()


def _character(document: bytes, position: int) -> int:
    """Returns the last position, not beyond `position`, at which a character of UTF-8 text begins."""
    while position > 0 and document[position] & 0xC0 == 0x80:
        position -= 1
    return position
