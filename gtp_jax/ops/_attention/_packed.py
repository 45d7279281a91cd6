"""Attention of packed rows in cuDNN's kernels, where each document costs only its own length.

Whether segments are runs, and how many there are, is known only when the program runs. So the program contains several
ways to compute the attention, and takes the first that fits the ids: a kernel for rows of one document each; cuDNN's
packed layout, with room for 4, 16 or (in long rows) 64 documents per row on average over the batch; or a mask of
(queries, keys), in long rows blocks of it, which is correct for any ids.

Room is not free: for every document that there is room for, cuDNN starts thread blocks, and allocates a workspace in
backward, for the full length of a row. So a call has room for only four times the tokens of the batch, and documents of
different lengths use separate calls: those longer than a quarter of a row, of which a row has three at most; those
longer than a sixteenth; and the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ...mesh import supports_packed_attention
from .._save import save_attention
from . import _cudnn_calls as cudnn
from ._blocks import MOST_MASKED, Rule, backward_in_blocks, forward_in_blocks
from ._contract import DotProductAttention, Problem
from ._cudnn import lacks_kernels
from ._cudnn_calls import Options, Ragged
from ._masks import allowed_by, both, in_order

SHORTEST = 1024  # the fewest tokens per row for which choosing pays off, as the host must wait for the device
_SHARE = 4  # documents that a call has room for, per `Call.length` tokens of the batch
_CALLS = 3  # the maximum number of calls of a way
_TILE = 128  # the tokens that a thread block of cuDNN works on; no call is for documents of a shorter length
_LARGEST_OFFSET = 2**31 - 1  # cuDNN's offsets are int32, in elements
# Added to masked scores. cuDNN subtracts one such number from another, which must not overflow.
_UNSEEN = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}


class Documents(NamedTuple):
    """Documents, which are runs of equal segment ids, numbered across all rows.

    Attributes:
        number: `(batch, sequence)` int32, the document of each token.
        starts: `(room + 1,)` int32, where documents begin, in tokens of all rows concatenated. Entries after the last
            document are the number of tokens.
        way: the way to take: 0 if every row is one document; otherwise, the fewest calls that have room for all
            documents; the maximum number of calls plus one if even those do not have room, or if an id recurs in a row.
    """

    number: jax.Array
    starts: jax.Array
    way: jax.Array


class Call(NamedTuple):
    """The documents that one call of cuDNN computes; a way makes one or more such calls.

    Attributes:
        length: the maximum length of its documents.
        documents: where its documents are.
        slot: `(batch, sequence)`, the index of a token's document among them.
        mine: `(batch, sequence)`, whether a token's document is among them.
    """

    length: int
    documents: Ragged
    slot: jax.Array
    mine: jax.Array


def packed_lacks(q: Any, *, causal: bool, window: int | None) -> str:
    """Returns why self-attention with segments does not use the packed layout here; an empty string if it does."""
    if not supports_packed_attention():
        return "cuDNN supports packed documents from compute capability 9.0 (H100)"
    if window is not None and not causal:
        return "cuDNN has no window to both sides"
    if q.shape[1] < SHORTEST:
        return f"a row has {q.shape[1]} tokens, and choosing pays off from {SHORTEST}"
    if q.size > _LARGEST_OFFSET:
        return f"the queries have {q.size} elements, and cuDNN's offsets end at {_LARGEST_OFFSET}"
    return sharded_by_xla(q)


def sharded_by_xla(q: Any) -> str:
    """Returns why cuDNN's custom calls may not take such an array in the current scope, where XLA may have to shard it;
    an empty string if they may."""
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
    """Computes attention among tokens with the same id in cuDNN; equal to `attention` with the same arguments.

    The result is correct for any ids. It is fast if the ids of each row form runs, each with an id of its own, and
    there are not too many runs.
    """
    return _attention(q, k, v, segment_ids, Options(causal, window, float(scale)))


def _lacks(problem: Problem) -> str:
    if lacks := lacks_kernels(problem):
        return lacks
    if problem.segment_ids is None or problem.unseeing:
        return "only tokens that see themselves, in segments of one sequence, are packed"
    return packed_lacks(problem.q, causal=problem.causal, window=problem.window)


def _run(problem: Problem) -> jax.Array:
    q, k, v, ids = problem.q, problem.k, problem.v, jnp.asarray(problem.segment_ids)
    return packed_attention(q, k, v, ids, causal=problem.causal, window=problem.window, scale=problem.scale)


PACKED = DotProductAttention(native=True, lacks=_lacks, run=_run)


def documents_of(segment_ids: jax.Array) -> Documents:
    """Finds the documents of a batch.

    Args:
        segment_ids: `(batch, sequence)` integers.
    """
    batch, sequence = segment_ids.shape
    most = calls_for(sequence)
    begins = segment_ids[:, 1:] != segment_ids[:, :-1]
    begins = jnp.concatenate([jnp.ones((batch, 1), bool), begins], axis=1).reshape(-1)
    number = jnp.cumsum(begins, dtype=jnp.int32) - 1
    numbers = jnp.arange(batch * _SHARE**most + 1, dtype=jnp.int32)
    starts = jnp.sum(number < numbers[:, None], axis=1, dtype=jnp.int32)  # the number of tokens before a document
    count = number[-1] + 1

    first = jnp.minimum(starts[:-1], batch * sequence - 1)
    same = segment_ids.reshape(-1)[first][:, None] == segment_ids.reshape(-1)[first]
    same &= (first // sequence)[:, None] == first // sequence
    there = numbers[:-1] < count
    again = jnp.any(same & there[:, None] & there & (numbers[:-1, None] < numbers[:-1]))
    way = jnp.sum(count > batch * _SHARE ** jnp.arange(most + 1), dtype=jnp.int32)
    return Documents(number.reshape(batch, sequence), starts, jnp.where(again, most + 1, way))


def calls_for(sequence: int) -> int:
    """Returns the maximum number of calls of a way for rows of this length; n calls have room for `4**n` documents per
    row."""
    calls = 1
    while calls < _CALLS and sequence % _SHARE**calls == 0 and sequence // _SHARE**calls >= _TILE:
        calls += 1
    return calls


def calls_of(documents: Documents, way: int) -> list[Call]:
    """Divides documents among the calls of a way, by length."""
    batch, sequence = documents.number.shape
    starts, lengths = documents.starts[:-1], jnp.diff(documents.starts)
    limits = [sequence // _SHARE**n for n in range(way)]
    # a call is for lengths above the limit of the next one
    which = sum((lengths <= limit).astype(jnp.int32) for limit in limits) - 1
    calls = []
    for n, limit in enumerate(limits):
        mine = (which == n) & (lengths > 0)
        behind = jnp.cumsum(mine, dtype=jnp.int32)  # the number of this call's documents up to and including each one
        slots = jnp.arange(batch * _SHARE ** (n + 1) + 1, dtype=jnp.int32)
        chosen = jnp.sum(behind <= slots[:, None], axis=1)  # the document of a slot; out of range if the slot is unused
        ragged = Ragged(
            jnp.take(starts, chosen, mode="fill", fill_value=batch * sequence),
            jnp.take(lengths, chosen[:-1], mode="fill", fill_value=0),
        )
        calls.append(Call(limit, ragged, (behind - 1)[documents.number], mine[documents.number]))
    return calls


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, options: Options) -> jax.Array:
    return _forward(options)(q, k, v, segment_ids)[0]


def _attention_forward(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, options: Options) -> Any:
    # remat policies save the results of `jax.nn.dot_product_attention`, so they must save these too
    out, stats = map(save_attention, _forward(options)(q, k, v, segment_ids))
    return out, (q, k, v, segment_ids, stats, out)


def _attention_backward(options: Options, saved: Any, of_out: jax.Array) -> Any:
    return *_backward(options)(*saved, of_out), None


_attention.defvjp(_attention_forward, _attention_backward)


@functools.cache
def _forward(options: Options) -> Callable[..., Any]:
    def forward(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        documents = documents_of(segment_ids)

        def alone() -> tuple[jax.Array, jax.Array]:
            return cudnn.forward(q, k, v, None, None, options)

        def packed(way: int) -> tuple[jax.Array, jax.Array]:
            results = []
            for call in (calls := calls_of(documents, way)):
                rows = (_rows_of(x, call.length) for x in (q, k, v))
                out, stats = cudnn.forward(*rows, bias=None, documents=call.documents, options=options)
                results.append((out.reshape(q.shape), _by_row(stats, documents, call)))
            return _merge(calls, results)

        def masked() -> tuple[jax.Array, jax.Array]:
            if q.shape[1] ** 2 > MOST_MASKED:
                return forward_in_blocks(q, k, v, _rule(segment_ids, options), scale=options.scale)
            return cudnn.forward(q, k, v, _bias(q, segment_ids, options), None, options._replace(window=None))

        return _choose(documents.way, alone, packed, masked, q.shape[1])

    return joining_batches(forward)


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
        documents = documents_of(segment_ids)

        def alone() -> tuple[jax.Array, jax.Array, jax.Array]:
            return cudnn.backward(q, k, v, None, None, stats, out, of_out, options)

        def packed(way: int) -> tuple[jax.Array, jax.Array, jax.Array]:
            results = []
            for call in (calls := calls_of(documents, way)):
                rq, rk, rv, ry, rdy = (_rows_of(x, call.length) for x in (q, k, v, out, of_out))
                by_document = _by_document(stats, call)
                gradients = cudnn.backward(rq, rk, rv, None, call.documents, by_document, ry, rdy, options)
                results.append(tuple(g.reshape(x.shape) for g, x in zip(gradients, (q, k, v), strict=True)))
            return _merge(calls, results)

        def masked() -> tuple[jax.Array, jax.Array, jax.Array]:
            if q.shape[1] ** 2 > MOST_MASKED:
                rule = _rule(segment_ids, options)
                gradients = backward_in_blocks(q, k, v, rule, out, stats, of_out, scale=options.scale)
                of_q, of_k, of_v = (g.astype(x.dtype) for g, x in zip(gradients, (q, k, v), strict=True))
                return of_q, of_k, of_v
            bias = _bias(q, segment_ids, options)
            return cudnn.backward(q, k, v, bias, None, stats, out, of_out, options._replace(window=None))

        return _choose(documents.way, alone, packed, masked, q.shape[1])

    return joining_batches(backward)


def _choose(
    way: jax.Array,
    alone: Callable[[], Any],
    packed: Callable[[int], Any],
    masked: Callable[[], Any],
    sequence: int,
) -> Any:
    ways = [functools.partial(packed, calls + 1) for calls in range(calls_for(sequence))]
    return lax.switch(way, [alone, *ways, masked])


def _rows_of(x: jax.Array, length: int) -> jax.Array:
    """Returns `(batch, sequence, heads, head_dim)` as shorter rows, which moves no data."""
    return x.reshape(-1, length, *x.shape[2:])


def _merge(calls: list[Call], results: list[tuple[jax.Array, ...]]) -> Any:
    """Takes the values of each token from the call of its document; the other calls do not write them."""

    def merged(*arrays: jax.Array) -> jax.Array:
        result = arrays[-1]
        for call, array in zip(calls[:-1], arrays[:-1], strict=True):
            # tokens are the second dimension, but the last one of statistics
            mine = call.mine[:, None] if array.ndim == 3 else call.mine[:, :, None, None]
            result = jnp.where(mine, array, result)
        return result

    return jax.tree.map(merged, *results)


def joining_batches(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `vmap` merge its dimension into the batch, for a function whose operands and results all begin with the
    batch.

    Otherwise every way would run, and the correct results would be selected afterwards.
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


def _rule(segment_ids: jax.Array, options: Options) -> Rule:
    return Rule(options.causal, options.window, segments=(segment_ids, segment_ids))


def _bias(q: jax.Array, segment_ids: jax.Array, options: Options) -> jax.Array:
    """Returns the bias that is added to scores, `(batch, 1, sequence, sequence)`; 0 where segments and window allow a
    token to attend. Without a window, the kernel itself applies `causal`."""
    sequence = q.shape[1]
    near = None if options.window is None else in_order(sequence, sequence, options.causal, options.window)
    seen = both(allowed_by(None, segment_ids), near)
    assert seen is not None
    return jnp.where(seen, 0, jnp.asarray(_UNSEEN[q.dtype.name], q.dtype))


def _by_row(stats: jax.Array, documents: Documents, call: Call) -> jax.Array:
    """Returns `(documents, heads, places)` as `(batch, heads, sequence)`, which is smaller to save for backward."""
    number = documents.number
    tokens = jnp.arange(number.size, dtype=jnp.int32).reshape(number.shape)
    return jnp.moveaxis(stats[call.slot, :, tokens - documents.starts[number]], -1, 1)


def _by_document(stats: jax.Array, call: Call) -> jax.Array:
    """Returns `(batch, heads, sequence)` as `(documents, heads, places)`; values after the end of a document are
    arbitrary."""
    batch, heads, sequence = stats.shape
    tokens = call.documents.starts[:-1, None] + jnp.arange(call.length, dtype=jnp.int32)
    tokens = jnp.minimum(tokens, batch * sequence - 1)
    return jnp.moveaxis(jnp.moveaxis(stats, 1, 0).reshape(heads, -1)[:, tokens], 0, 1)
