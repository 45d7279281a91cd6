"""Compares attention over rows of packed documents with attention without segment ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gtp_jax.ops import attention

from ._timing import seconds_a_call


@dataclasses.dataclass(frozen=True)
class PackedRow:
    """The time of attention's forward and backward passes for one kind of row.

    Attributes:
        documents: the number of documents per row; 0 without segment ids.
        lengths: "even"; "uneven": the first document is long, the others have 64 tokens, or fewer if the row has fewer
            than 8,192 tokens; "id comes back": as "even", but the last document has the same id as the first; or empty
            without segment ids.
        work: the number of unmasked scores, as a fraction of those of a row that is a single document.
        seconds: the time of forward and backward together, in seconds.
    """

    documents: int
    lengths: str
    work: float
    seconds: float


def measure_packed_rows(config: Any, *, seq: int, documents: Sequence[int], batch: int = 1) -> Iterator[PackedRow]:
    """Times one layer's causal attention in bfloat16 on one device: without segment ids, then for each number of
    documents and each kind of row.

    Args:
        config: the configuration of a model, with `num_heads`, `num_kv_heads` and `head_dim`.
        seq: the number of tokens per row.
        documents: the numbers of documents per row to measure.
        batch: the number of rows.

    Raises:
        ValueError: if a row is too short for one of these numbers of documents.
    """
    too_many = [n for n in documents if n > 1 and (n - 1) * _short(seq) >= seq]
    if too_many:
        raise ValueError(
            f"`documents` contains {too_many[0]}, but a row of {seq} tokens has room for at most "
            f"{_short_documents(seq)} documents. Use smaller numbers, or a larger `seq`."
        )
    shapes = [
        (batch, seq, heads, config.head_dim) for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    ]
    keys = jax.random.split(jax.random.key(0), 4)
    operands = [jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, [*shapes, shapes[0]], strict=True)]
    alone = jax.jit(lambda *given: _step(None, *given))
    yield PackedRow(0, "", 1.0, seconds_a_call(alone, *operands))
    packed = jax.jit(_step)
    for count in documents:
        for name, ids in _rows(seq, count):
            lengths = np.unique_counts(ids).counts
            work = float(np.sum(lengths * (lengths + 1)) / (seq * (seq + 1)))
            given = jnp.asarray(np.broadcast_to(ids, (batch, seq)))
            yield PackedRow(count, name, work, seconds_a_call(packed, given, *operands))


def _step(segment_ids: Any, q: jax.Array, k: jax.Array, v: jax.Array, of_output: jax.Array) -> Any:
    y, back = jax.vjp(lambda *t: attention(*t, causal=True, segment_ids=segment_ids), q, k, v)
    return y, back(of_output)


def _short(seq: int) -> int:
    return min(64, max(1, seq // 128))


def _short_documents(seq: int) -> int:
    """Returns how many documents of a short length a row has room for; the last may be shorter."""
    return -(-seq // _short(seq))


def _rows(seq: int, count: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yields the name and the segment ids, `(seq,)`, of each kind of row with `count` documents."""
    even = np.arange(seq) * count // seq
    yield "even", even
    if count > 1:
        yield "uneven", np.maximum(np.arange(seq) // _short(seq) - (_short_documents(seq) - count), 0)
    if count > 2:
        yield "id comes back", np.where(even == count - 1, 0, even)
