"""Attention of packed rows in cuDNN's kernels, each document as long as it is.

Whether segments are runs, and how many, is known only when the program runs. So it has several ways, and takes the
cheapest that is right for the ids that come: no documents at all, cuDNN's packed layout with room for a few documents
a row or for many, and the array of (queries, keys), which is right for any ids. Room costs time: cuDNN starts blocks of
threads for as many documents of the whole sequence's length as there is room for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ..mesh import supports_packed_attention
from . import _cudnn_calls as cudnn
from ._cudnn_calls import Options
from ._masks import allowed_by, both, in_order

SHORTEST = 1024  # tokens of a row from which on it is worth choosing, which costs the host a wait for the device
_ROOM = (1, 4, 16, 64)  # documents a row, on average over the batch
_TOKENS = 64  # that documents have on average, at least: softmax statistics then take no more memory than a mask
_LARGEST_OFFSET = 2**31 - 1  # cuDNN's offsets are int32, in elements
# Added to scores that a token may not see. cuDNN subtracts one such number from another, which must not overflow.
_UNSEEN = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}


class Documents(NamedTuple):
    """Runs of equal segment ids, numbered through all rows.

    Attributes:
        number: `(batch, sequence)` int32, the document of each token.
        starts: `(room + 1,)` int32, where documents begin, in tokens of all rows behind one another. Entries behind the
            last document are the number of tokens.
        way: which of the ways is taken: by its place among the rooms, or the one behind the last.
    """

    number: jax.Array
    starts: jax.Array
    way: jax.Array


def packed_lacks(q: Any, *, causal: bool, window: int | None) -> str:
    """Says why attention to segments of one's own sequence is not packed here; nothing if it is."""
    if not supports_packed_attention():
        return "cuDNN packs documents from compute capability 9.0 (H100) on"
    if window is not None and not causal:
        return "cuDNN has no window to both sides"
    if q.shape[1] < SHORTEST:
        return f"a row has {q.shape[1]} tokens, and choosing pays from {SHORTEST} on"
    if q.size > _LARGEST_OFFSET:
        return f"the queries are {q.size} elements, and cuDNN's offsets end at {_LARGEST_OFFSET}"
    mesh = jax.sharding.get_abstract_mesh()
    shared = (
        jax.device_count() > 1 if mesh.empty else any(n > 1 for a, n in mesh.shape.items() if a not in mesh.manual_axes)
    )
    if shared:
        return "arrays may be sharded, and XLA does not shard these calls; call it inside a `shard_map`"
    if jax.typeof(q).mat.varying:
        return "a `shard_map` checks how values vary over the mesh, which these calls do not say; pass check_vma=False"
    return ""


def packed_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, causal: bool, window: int | None, scale: float
) -> jax.Array:
    """Computes attention among tokens of the same id, by cuDNN: `attention` with the same arguments.

    Right for any ids. Fast where those of a row are runs, each with an id of its own, and not too many.
    """
    return _attention(q, k, v, segment_ids, Options(causal, window, float(scale)))


def documents_of(segment_ids: jax.Array, room: tuple[int, ...]) -> Documents:
    """Finds the documents of a batch.

    Args:
        segment_ids: `(batch, sequence)` integers.
        room: documents a row that the ways have room for, ascending.
    """
    batch, sequence = segment_ids.shape
    begins = segment_ids[:, 1:] != segment_ids[:, :-1]
    begins = jnp.concatenate([jnp.ones((batch, 1), bool), begins], axis=1).reshape(-1)
    number = jnp.cumsum(begins, dtype=jnp.int32) - 1
    numbers = jnp.arange(batch * room[-1] + 1, dtype=jnp.int32)
    starts = jnp.sum(number < numbers[:, None], axis=1, dtype=jnp.int32)  # tokens ahead of a document
    count = number[-1] + 1

    first = jnp.minimum(starts[:-1], batch * sequence - 1)
    same = segment_ids.reshape(-1)[first][:, None] == segment_ids.reshape(-1)[first]
    same &= (first // sequence)[:, None] == first // sequence
    there = numbers[:-1] < count
    again = jnp.any(same & there[:, None] & there & (numbers[:-1, None] < numbers[:-1]))
    way = jnp.sum(count > batch * jnp.asarray(room), dtype=jnp.int32)
    return Documents(number.reshape(batch, sequence), starts, jnp.where(again, len(room), way))


def room_of(sequence: int) -> tuple[int, ...]:
    """Returns the documents a row that the ways of a program have room for."""
    return tuple(n for n in _ROOM if n * _TOKENS <= sequence)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, options: Options) -> jax.Array:
    return _forward(options)(q, k, v, segment_ids)[0]


def _attention_forward(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, options: Options) -> Any:
    out, stats = _forward(options)(q, k, v, segment_ids)
    return out, (q, k, v, segment_ids, stats, out)


def _attention_backward(options: Options, saved: Any, of_out: jax.Array) -> Any:
    return *_backward(options)(*saved, of_out), None


_attention.defvjp(_attention_forward, _attention_backward)


@functools.cache
def _forward(options: Options) -> Callable[..., Any]:
    def forward(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        room = room_of(q.shape[1])
        documents = documents_of(segment_ids, room)

        def packed(starts: jax.Array) -> tuple[jax.Array, jax.Array]:
            out, stats = cudnn.forward(q, k, v, None, starts, options)
            return out, _by_row(stats, documents)

        def masked() -> tuple[jax.Array, jax.Array]:
            return cudnn.forward(q, k, v, _bias(q, segment_ids, options), None, options._replace(window=None))

        def alone() -> tuple[jax.Array, jax.Array]:
            return cudnn.forward(q, k, v, None, None, options)

        ways = [functools.partial(packed, documents.starts[: q.shape[0] * n + 1]) for n in room[1:]]
        return lax.switch(documents.way, [alone, *ways, masked])

    return _joining_batches(forward)


@functools.cache
def _backward(options: Options) -> Callable[..., Any]:
    def backward(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array,
        stats: jax.Array,
        out: jax.Array,
        of_out: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        room = room_of(q.shape[1])
        documents = documents_of(segment_ids, room)

        def run(bias: Any, starts: Any, stats: jax.Array, options: Options) -> tuple[jax.Array, jax.Array, jax.Array]:
            return cudnn.backward(q, k, v, bias, starts, stats, out, of_out, options)

        def packed(starts: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            return run(None, starts, _by_document(stats, starts), options)

        def masked() -> tuple[jax.Array, jax.Array, jax.Array]:
            return run(_bias(q, segment_ids, options), None, stats, options._replace(window=None))

        def alone() -> tuple[jax.Array, jax.Array, jax.Array]:
            return run(None, None, stats, options)

        ways = [functools.partial(packed, documents.starts[: q.shape[0] * n + 1]) for n in room[1:]]
        return lax.switch(documents.way, [alone, *ways, masked])

    return _joining_batches(backward)


def _joining_batches(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets `vmap` join its dimension with the batch, of a function whose operands and results all begin with it.

    Otherwise every way would run, and the right results be picked.
    """
    mapped = custom_vmap(function)

    @mapped.def_vmap
    def _(size: int, batched: list[bool], *operands: jax.Array) -> Any:
        whole = (
            x if there else jnp.broadcast_to(x, (size, *x.shape)) for x, there in zip(operands, batched, strict=True)
        )
        results = mapped(*(jnp.reshape(x, (-1, *x.shape[2:])) for x in whole))
        apart = jax.tree.map(lambda x: jnp.reshape(x, (size, -1, *x.shape[1:])), results)
        return apart, jax.tree.map(lambda _: True, apart)

    return mapped


def _bias(q: jax.Array, segment_ids: jax.Array, options: Options) -> jax.Array:
    """Returns what is added to scores: `(batch, 1, sequence, sequence)`, 0 where a token may attend."""
    sequence = q.shape[1]
    near = None if options.window is None else in_order(sequence, sequence, options.causal, options.window)
    seen = both(allowed_by(None, segment_ids), near)
    return jnp.where(seen, 0, jnp.asarray(_UNSEEN[q.dtype.name], q.dtype))


def _by_row(stats: jax.Array, documents: Documents) -> jax.Array:
    """Returns `(documents, heads, places)` as `(batch, heads, sequence)`, which is less to save."""
    number = documents.number
    tokens = jnp.arange(number.size, dtype=jnp.int32).reshape(number.shape)
    return jnp.moveaxis(stats[number, :, tokens - documents.starts[number]], -1, 1)


def _by_document(stats: jax.Array, starts: jax.Array) -> jax.Array:
    """Returns `(batch, heads, sequence)` as `(documents, heads, places)`; behind a document's end nothing is meant."""
    batch, heads, sequence = stats.shape
    tokens = jnp.minimum(starts[:-1, None] + jnp.arange(sequence, dtype=jnp.int32), batch * sequence - 1)
    return jnp.moveaxis(jnp.moveaxis(stats, 1, 0).reshape(heads, -1)[:, tokens], 0, 1)
