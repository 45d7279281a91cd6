"""Checks that a run continues with the text that its checkpoints were trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..data import Corpus


def stored_text(corpus: Corpus, seq: int) -> dict[str, Any]:
    """Returns what a checkpoint holds in `extra` about the text: digests of its tokens and of how rows are packed."""
    return {"text": corpus.fingerprint, "packing": corpus.packing_digest(seq)}


def check_same_text(extra: Mapping[str, Any], corpus: Corpus, seq: int) -> None:
    """Checks that a resumed run continues with the text that it was trained on; see `check_tokens`."""
    check_tokens(
        extra,
        corpus,
        seq,
        ", or --data or --tokenizer names another one. Resume with the original text and tokenizer, or start a new "
        "run with another --out.",
    )


def check_tokens(extra: Mapping[str, Any], corpus: Corpus, seq: int, remedy: str) -> None:
    """Checks that a run's tokens are the ones that its checkpoint was trained on.

    Args:
        extra: the `extra` that was saved with the checkpoint.
        corpus: the text of the run.
        seq: the number of tokens per row.
        remedy: the end of the message.

    Raises:
        ValueError: if the tokens, or the way in which documents are packed, have changed; the message names the text.
    """
    if extra["text"] != corpus.fingerprint:
        older = (
            f" Or the run was started by an older version of gtp_jax, which also read {' and '.join(corpus.unread)}; "
            "these are now left out. Continue with that version."
        )
        raise ValueError(
            f"the tokens of {corpus.name} by the tokenizer {corpus.tokenizer.name} differ from those that this run "
            "was trained on: the content of the text or of the tokenizer has "
            f"changed{remedy}{older if corpus.unread else ''}"
        )
    if extra.get("packing") != corpus.packing_digest(seq):
        raise ValueError(
            f"the rows of {corpus.name} differ from those that this run was trained on, because documents are packed "
            "differently. Resume with the original --seq, --packing and --data, or start a new run with another "
            "--out."
        )
