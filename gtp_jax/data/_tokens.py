"""Turns text into token numbers: bytes, or by a Hugging Face tokenizer file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from ..ops import check_ids

# Names that published tokenizers give to the end of a document.
_END = ("<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "</s>", "<eos>", "[SEP]")

# Documents handed to the tokenizer's threads at a time.
_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A way to turn documents into tokens.

    Attributes:
        name: for people.
        vocab_size: number of tokens, the separator included.
        separator: the token that stands after each document.
        encode: `documents -> tokens of each document`, without separators.
    """

    name: str
    vocab_size: int
    separator: int
    encode: Callable[[Iterable[bytes]], Iterable[np.ndarray]]

    @property
    def dtype(self) -> np.dtype:
        """The smallest integer type that holds every token."""
        return np.min_scalar_type(self.vocab_size - 1)

    def stream(self, documents: Iterable[bytes]) -> np.ndarray:
        """Returns the tokens of documents as one stream, the separator after each.

        Raises:
            ValueError: if a token is outside the vocabulary.
        """
        end = np.asarray([self.separator], self.dtype)
        parts = [part for tokens in self.encode(documents) for part in (self._checked(tokens), end)]
        return np.concatenate(parts) if parts else np.zeros(0, self.dtype)

    def _checked(self, tokens: np.ndarray) -> np.ndarray:
        check_ids(tokens, self.vocab_size, name=f"tokens of a document by {self.name}")
        return tokens.astype(self.dtype)


# Every byte is a token; byte 0 occurs in no text and separates documents.
BYTES = Tokenizer("bytes", 256, 0, lambda documents: (np.frombuffer(text, np.uint8) for text in documents))


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Reads a Hugging Face `tokenizer.json`.

    Its own end-of-text token separates documents; if it has none, one more token is added behind its vocabulary.

    Raises:
        ModuleNotFoundError: if the `tokenizers` package is not installed.
        ValueError: if the file is missing or is no tokenizer.
    """
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'a `tokenizer` file needs the `tokenizers` package: `pip install "gtp_jax[tokenizers]"`. '
            "Without a tokenizer, every byte is a token."
        ) from error
    if not Path(path).is_file():
        raise ValueError(f"`tokenizer` {path} is not a file. Give the tokenizer.json of a Hugging Face model.")
    try:
        loaded = tokenizers.Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # the package raises bare Exceptions
        raise ValueError(
            f"`tokenizer` {path} cannot be read as a Hugging Face tokenizer.json: {error}. A SentencePiece model must "
            "be converted first."
        ) from error
    loaded.no_truncation()
    loaded.no_padding()
    size = 1 + max(loaded.get_vocab(with_added_tokens=True).values(), default=-1)  # ids may have gaps
    known = [token for token in map(loaded.token_to_id, _END) if token is not None]
    separator = known[0] if known else size

    def encode(documents: Iterable[bytes]) -> Iterable[np.ndarray]:
        texts = [text.decode() for text in documents]
        for start in range(0, len(texts), _CHUNK):
            for encoding in loaded.encode_batch_fast(texts[start : start + _CHUNK], add_special_tokens=False):
                yield np.asarray(encoding.ids, np.int64)

    return Tokenizer(Path(path).name, max(size, separator + 1), separator, encode)
