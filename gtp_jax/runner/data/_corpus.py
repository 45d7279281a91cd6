"""A corpus: training documents and held-out documents as tokens, and the rows that are cut from them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ..._words import STREAM
from ._chat import Chat
from ._documents import Documents, fingerprint
from ._mixture import Joined, Mixture
from ._packed import Packed
from ._rows import Rows
from ._text import Text
from ._token_files import bytes_of, read_tokens, split_tokens
from ._tokens import BYTES, Tokenizer
from ._windows import Windows


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A text of a corpus, in host memory or mapped from files.

    Attributes:
        name: the name of the text.
        train: the documents to train on.
        held_out: documents that are not in `train`.
        held_out_bytes: the size in bytes of the text of `held_out` that the loss counts.
        weight: its share of the rows of the run, relative to the weights of the other sources.
    """

    name: str
    train: tuple[Documents, ...]
    held_out: tuple[Documents, ...]
    held_out_bytes: float
    weight: float = 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluated:
    """A text to evaluate on in addition to the held-out documents.

    Attributes:
        name: the name of the text.
        documents: the tokens of the text.
        bytes_per_token: the number of bytes per token of the text that the loss counts.
    """

    name: str
    documents: tuple[Documents, ...]
    bytes_per_token: float

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the tokens: equal tokens have equal digests."""
        return fingerprint(*self.documents)


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Training tokens and held-out tokens.

    Attributes:
        name: the name of the text.
        tokenizer: the tokenizer that its tokens belong to.
        sources: the texts that it consists of; the rows of several are mixed by weight.
        packing: how rows are made, one of `PACKINGS`.
        unread: descriptions of what was left out of the text but was read by older versions of gtp_jax.
        evaluated: further texts to evaluate on.
        chat: how its conversations were turned into tokens, if it has any.
    """

    name: str
    tokenizer: Tokenizer
    sources: tuple[Source, ...]
    packing: str = STREAM
    unread: tuple[str, ...] = ()
    evaluated: tuple[Evaluated, ...] = ()
    chat: Chat | None = None

    @property
    def vocab_size(self) -> int:
        """The number of token ids of the tokenizer."""
        return self.tokenizer.vocab_size

    @property
    def train(self) -> tuple[Documents, ...]:
        """The documents to train on."""
        return tuple(one for source in self.sources for one in source.train)

    @property
    def held_out(self) -> tuple[Documents, ...]:
        """Documents that are not in `train`."""
        return tuple(one for source in self.sources for one in source.held_out)

    @property
    def bytes_per_token(self) -> float:
        """The number of bytes per token of the held-out text that the loss counts."""
        return sum(source.held_out_bytes for source in self.sources) / max(1, _counted(self.held_out))

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of all tokens, of which ones the loss counts and of the sources' weights: equal if all are equal."""
        weights = [source.weight for source in self.sources] if len(self.sources) > 1 else ""
        return fingerprint(*self.train, *self.held_out, more=str(weights))

    def rows(self, seq: int, seed: int) -> Rows:
        """Returns the rows to train on, of `seq` tokens each.

        Raises:
            ValueError: if a source has no row.
        """
        parts = [_rows(source.train, self.packing, source.name, seq, seed) for source in self.sources]
        return parts[0] if len(parts) == 1 else Mixture(parts, [source.weight for source in self.sources], seq)

    def held_out_rows(self, seq: int, seed: int) -> Rows:
        """Returns the rows of all held-out documents, for one epoch.

        Raises:
            ValueError: if there is none.
        """
        return _rows(self.held_out, self.packing, self.name, seq, seed, repeat=False)

    def rows_of(self, text: Evaluated, seq: int, seed: int) -> Rows:
        """Returns the rows of a text to evaluate on, for one epoch."""
        return _rows(text.documents, self.packing, text.name, seq, seed, repeat=False)

    def packing_digest(self, seq: int) -> str | None:
        """Returns a digest of which pieces of documents make each row.

        Returns `None` if rows are cut from a stream, because `seq` alone then determines them.
        """
        if self.packing == STREAM:
            return None
        digests = [Packed(one, seq).digest for one in self.train if _has_row(one, self.packing, seq)]
        return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()

    def check(self, *, batch: int, seq: int) -> None:
        """Checks that there is enough text for a batch.

        Raises:
            ValueError: if there are fewer training rows than one batch has, or if the held-out documents or a text of
                `evaluated` have no row.
        """
        rows = len(self.rows(seq, 0)) if any(_has_row(one, self.packing, seq) for one in self.train) else 0
        if rows < batch:
            needs = (
                f"but one batch of {batch} sequences of {seq} needs {batch * seq + 1}"
                if self.packing == STREAM and len(self.train) == 1
                else f"which make {rows} rows of {seq}, but one batch has {batch}"
            )
            raise ValueError(
                f"too few tokens: {self.name} has {tokens_of(self.train)} to train on, {needs}. Give more text, or a "
                "smaller `batch` or `seq`."
            )
        if not any(_has_row(one, self.packing, seq) for one in self.held_out):
            raise ValueError(
                f"too few tokens: {self.name} has {tokens_of(self.held_out)} held out, but one sequence of {seq} needs "
                f"{self._least(seq)}. Give more text, or a smaller `seq`."
            )
        for text in self.evaluated:
            if not any(_has_row(one, self.packing, seq) for one in text.documents):
                raise ValueError(
                    f"too few tokens: {text.name} of `eval_data` has {tokens_of(text.documents)}, but one sequence of "
                    f"{seq} needs {self._least(seq)}. Leave it out, or give a smaller `seq`."
                )

    def _least(self, seq: int) -> str:
        return f"{seq + 1}" if self.packing == STREAM else "a document of 2"


def load_corpus(text: Text, tokenizer: Tokenizer = BYTES, *, held_out: float = 0.05) -> Corpus:
    """Splits a text and turns it into tokens: see `load_source`."""
    return Corpus(text.name, tokenizer, (load_source(text, tokenizer, held_out=held_out),), unread=text.unread)


def load_source(
    text: Text,
    tokenizer: Tokenizer = BYTES,
    *,
    held_out: float = 0.05,
    token_dtype: str | None = None,
    weight: float = 1.0,
    chat: Chat | None = None,
) -> Source:
    """Splits a text into training documents and held-out documents, and turns them into tokens.

    Of each file of token ids, the last documents are held out.

    Args:
        text: documents, files of token ids and files of conversations.
        tokenizer: the tokenizer that turns documents into tokens.
        held_out: the maximum share of the text's bytes, and of each file's tokens, to hold out.
        token_dtype: the dtype of `.bin` files that do not state their own.
        weight: the weight of the source.
        chat: turns conversations into tokens, if the text has any. Conversations are not cut: if none fits in the
            share, the smallest is held out.

    Raises:
        ValueError: if `held_out` is not between 0 and 1, something cannot be read, or there are conversations but no
            `chat`.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"`held_out` is {held_out}; it must be a share between 0 and 1.")
    parts: list[tuple[Documents, Documents, float]] = []
    if len(text.documents):
        kept, apart = split(text.documents, held_out)
        parts.append((tokenizer.documents(kept), tokenizer.documents(apart), _bytes(apart)))
    if text.chat_files:
        chat = _checked(chat, text)
        kept, apart = split(chat.read(text.chat_files), held_out, cut=False)
        parts.append((chat.documents(kept), chat.documents(apart), chat.bytes_of(apart)))
    for file in text.token_files:
        before, after = split_tokens(read_tokens(file, tokenizer, token_dtype), held_out)
        parts.append((before, after, bytes_of(after.tokens, tokenizer)))
    trained, apart, sizes = zip(*parts, strict=True)
    return Source(text.name, trained, apart, sum(sizes), weight)


def load_evaluated(
    text: Text, tokenizer: Tokenizer, *, token_dtype: str | None = None, chat: Chat | None = None
) -> Evaluated:
    """Turns a text into tokens to evaluate on as a whole: see `load_source`."""
    parts = [tokenizer.documents(text.documents)] if len(text.documents) else []
    files = [read_tokens(file, tokenizer, token_dtype) for file in text.token_files]
    size = _bytes(text.documents) + sum(bytes_of(one.tokens, tokenizer) for one in files)
    if text.chat_files:
        chat = _checked(chat, text)
        conversations = chat.read(text.chat_files)
        parts.append(chat.documents(conversations))
        size += chat.bytes_of(conversations)
    return Evaluated(text.name, (*parts, *files), size / max(1, _counted([*parts, *files])))


def tokens_of(documents: Sequence[Documents]) -> int:
    """Returns the total number of tokens in documents."""
    return sum(len(one.tokens) for one in documents)


def _checked(chat: Chat | None, text: Text) -> Chat:
    """Returns `chat`, which turns conversations into tokens; raises a ValueError if it is `None`."""
    if chat is None:
        raise ValueError(f"`data` {text.chat_files[0]} holds conversations, but there is no chat template. Give texts.")
    return chat


def _counted(documents: Sequence[Documents]) -> int:
    """Returns the number of tokens that the loss counts."""
    return sum(len(one.counted) for one in documents)


def _has_row(documents: Documents, packing: str, seq: int) -> bool:
    if packing == STREAM:
        return len(documents.tokens) > seq
    return bool((np.diff(documents.offsets) > 1).any())


def _rows(documents: Sequence[Documents], packing: str, name: str, seq: int, seed: int, *, repeat: bool = True) -> Rows:
    """Returns the rows of documents, without those that are too short for a row.

    Raises:
        ValueError: if all are too short; the message names the text.
    """
    parts: list[Rows] = [
        Windows(one.tokens, seq, seed, repeat, one.answers) if packing == STREAM else Packed(one, seq, seed, repeat)
        for one in documents
        if _has_row(one, packing, seq)
    ]
    if not parts:
        raise ValueError(
            f"too few tokens: {name} has {tokens_of(documents)}, too few for one row of {seq}. Give more text, or a "
            "smaller `seq`."
        )
    return parts[0] if len(parts) == 1 else Joined(parts, seq, seed, repeat)


def _bytes(documents: Iterable[bytes]) -> float:
    """Returns the size of documents in bytes, one separator each included."""
    return sum(len(document) + 1 for document in documents)


def split(documents: Sequence[bytes], held_out: float, *, cut: bool = True) -> tuple[Iterable[bytes], Iterable[bytes]]:
    """Returns the documents to train on, in their order, and the held-out documents, in the order of their hashes.

    A document's hash depends only on its content, so that its name and place do not matter and all copies of it are on
    the same side. Documents are visited in the order of their hashes, and each that fits in the rest of the share
    `held_out` is held out. If none fits, the tail of every document is held out instead, cut between two
    characters; without `cut`, the smallest document is. Empty documents are left out. The documents of either side are
    read anew whenever that side is iterated over.
    """
    hashes: list[bytes] = []
    copies: dict[bytes, list[int]] = {}  # the places of all copies, by hash
    sizes: list[int] = []
    for place, document in enumerate(documents):
        hashes.append(_hash(document))
        sizes.append(len(document))
        if document:
            copies.setdefault(hashes[-1], []).append(place)
    budget = held_out * sum(sizes)
    apart: list[int] = []
    for places in (copies[one] for one in sorted(copies)):
        size = sizes[places[0]] * len(places)
        if size <= budget:
            budget -= size
            apart += places
    if not apart and not cut and len(copies) > 1:
        apart = min(copies.values(), key=lambda places: (sizes[places[0]] * len(places), hashes[places[0]]))
    if apart or not cut:
        chosen = {*apart, *(place for place, size in enumerate(sizes) if not size)}
        return _Read(lambda: (one for place, one in enumerate(documents) if place not in chosen)), _Read(
            lambda: (documents[place] for place in apart)
        )
    cuts = [(document, _character(document, int(len(document) * (1 - held_out)))) for document in documents if document]
    return [document[:cut] for document, cut in cuts if cut], [document[cut:] for document, cut in cuts]


class _Read(Iterable[bytes]):
    """Documents that are read anew whenever they are iterated over."""

    def __init__(self, read: Callable[[], Iterator[bytes]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[bytes]:
        return self._read()


def _hash(document: bytes) -> bytes:
    return hashlib.blake2b(document, digest_size=16).digest()


def _character(document: bytes, position: int) -> int:
    """Returns the last position, at most `position`, at which a character of UTF-8 text begins."""
    while position > 0 and document[position] & 0xC0 == 0x80:
        position -= 1
    return position
