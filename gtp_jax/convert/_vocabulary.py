"""Reads the ids of tokens from the files of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .._foreign import brief
from ..models import TOKENIZER_FILE
from ._others import parse_other

_SHOWN = 8


def tokens_beyond(files: Mapping[str, bytes], vocab_size: int) -> dict[int, str]:
    """Returns the tokens that the files name but a model with this vocabulary lacks, by id, ascending.

    Some published models lack tokens that were added to their tokenizers, for example for padding. Content that does
    not have the expected form is ignored.

    Args:
        files: the contents of the tokenizer's files, by name.
        vocab_size: the size of the model's vocabulary.
    """
    found: dict[int, str] = {}
    for name, tokens in _READERS.items():
        if name in files:
            found |= {i: str(t) for t, i in tokens(parse_other(files[name])) if type(i) is int and i >= vocab_size}
    return dict(sorted(found.items()))


def warning_of(tokens: Mapping[int, str], vocab_size: int, where: str) -> str:
    """Returns a warning about tokens that a model lacks."""
    more = f" and {len(tokens) - _SHOWN} more" if len(tokens) > _SHOWN else ""
    named = ", ".join(f"{brief(i)} ({brief(token)})" for i, token in list(tokens.items())[:_SHOWN])
    return (
        f"the tokenizer in {where} has ids that the model lacks, whose vocabulary ends at {vocab_size - 1}: {named}"
        f"{more}. Its files are kept unchanged. `gtp-jax train` refuses text with such a token; in your own program, "
        "the loss becomes NaN, and `gtp_jax.ops.check_ids` names the token."
    )


def _of_tokenizer(content: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        yield from vocab.items()
    elif isinstance(vocab, list):  # pairs of a token and its score
        yield from ((pair[0] if isinstance(pair, list) and pair else pair, i) for i, pair in enumerate(vocab))
    added = content.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            yield token.get("content"), token.get("id")


_READERS = {
    TOKENIZER_FILE: _of_tokenizer,
    "vocab.json": dict.items,
    "added_tokens.json": dict.items,
}
