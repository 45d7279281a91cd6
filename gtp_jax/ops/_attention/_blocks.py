"""Attention in blocks of queries and keys, with memory that is linear in tokens in forward and in backward.

Forward keeps, for each query, the largest score so far, the sum of weights relative to it, and the weighted sum of
values (online softmax, arXiv 1805.02867). It returns their log-sum-exp, from which backward computes the weights of
each block again, as FlashAttention does (arXiv 2205.14135). Both loop over pairs of a block of queries and a block of
keys. Pairs that `causal` or the window excludes are left out when the program is traced.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._as_one import as_one
from .._save import save_attention
from ._contract import DotProductAttention, Problem
from ._masks import allowed_by, both, by_group, in_order

# The most queries x keys for which attention is not computed in blocks: if every head has an array of scores; and if
# cuDNN reads a mask that this library makes, which all heads share.
MOST_SCORES, MOST_MASKED = 2048 * 2048, 8192 * 8192
_ELEMENTS = 2**25  # the most scores of a block, over batch and heads, unless the smallest block has more
_SMALLEST, _LARGEST = 128, 2048  # the sides of a block

_STATIC = {"static": True}  # a field that is a constant of the program


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rule:
    """Where queries may attend: everywhere that every field allows.

    Attributes:
        causal: whether a query may not attend to later keys.
        window: a query attends to keys less than this many positions away; `None` for no window.
        first: the position of the first query among the keys.
        shift: integers `()` or `(batch,)`, added to `first`; `None` for 0. With a shift, no block is left out.
        mask: boolean, true where a query may attend: `(batch or 1, heads or 1, queries or 1, keys)`.
        segments: integers `(batch, queries)` and `(batch, keys)`; a query attends to keys with the same id.
    """

    causal: bool = dataclasses.field(default=False, metadata=_STATIC)
    window: int | None = dataclasses.field(default=None, metadata=_STATIC)
    first: int = dataclasses.field(default=0, metadata=_STATIC)
    shift: jax.Array | None = None
    mask: jax.Array | None = None
    segments: tuple[jax.Array, jax.Array] | None = None


class Dropout(NamedTuple):
    """Dropout of attention weights.

    Attributes:
        rate: the fraction of weights that are set to 0; the others are multiplied by `1 / (1 - rate)`.
        key: a key of `jax.random`. The bits of a block are those of this key, folded with the number of the block.
    """

    rate: float
    key: jax.Array


def forward_in_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rule: Rule,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    dropout: Dropout | None = None,
    sides: tuple[int, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes attention, and the log-sum-exp of the scores. Both have gradients, which can be differentiated again.

    Forward and backward need memory that is linear in the lengths. A second derivative keeps, for each pair of blocks,
    the sums for all queries from before that pair.

    Args:
        q: `(batch, queries, heads, head_dim)`.
        k: `(batch, keys, kv_heads, head_dim)`; `kv_heads` divides `heads`.
        v: the same shape as `k`.
        rule: where queries may attend.
        scale: the factor of the scores.
        soft_cap, sinks: as in `attention`.
        dropout: the dropout of weights, if any.
        sides: the number of queries and of keys of a block; by default, they depend on the number of heads.

    Returns:
        The output, `(batch, queries, heads, head_dim)` in the dtype of `q`, and the log-sum-exp, `(batch, heads,
        queries)` in at least float32, to which sinks contribute. A query that sees no key has the output 0; its
        log-sum-exp is that of its sink, or -inf.
    """
    rate, key = (0.0, None) if dropout is None else dropout
    options = _Options(scale, soft_cap, rate, _sides(q, k, sides))
    return _in_blocks(options, *_varying_alike((q, k, v, sinks, rule, key)))


def _lacks(problem: Problem) -> str:
    return "" if problem.scores > MOST_SCORES else "so few scores are written out faster"


def _run(problem: Problem) -> jax.Array:
    known = problem.first is None or isinstance(problem.first, int)
    ids, mask = problem.segment_ids, problem.mask
    pair = ids if isinstance(ids, tuple) else (ids, ids)
    rule = Rule(
        problem.causal,
        problem.window,
        first=(problem.first or 0) if known else 0,
        shift=None if known else jnp.asarray(problem.first),
        mask=None if mask is None else allowed_by(jnp.asarray(mask), None),
        segments=None if ids is None else (jnp.asarray(pair[0]), jnp.asarray(pair[1])),
    )
    rate, key = problem.dropout_rate, problem.dropout_key
    dropout = Dropout(rate, key) if key is not None and rate else None
    more: dict[str, Any] = {"soft_cap": problem.soft_cap, "sinks": problem.sinks, "dropout": dropout}
    return forward_in_blocks(problem.q, problem.k, problem.v, rule, scale=problem.scale, **more)[0]


IN_BLOCKS = DotProductAttention(native=False, lacks=_lacks, run=_run)


def backward_in_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rule: Rule,
    out: jax.Array,
    lse: jax.Array,
    of_out: jax.Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    dropout: Dropout | None = None,
    of_lse: jax.Array | None = None,
    sides: tuple[int, int] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of queries, keys and values, in at least float32.

    `k` and `v` may be a part of the keys and values that the queries attend to, while `out` and `lse` are those for all
    of them. The results are then the part's contribution to the gradient of the queries, and the part's own gradients.

    Args:
        q, k, v, rule, scale, soft_cap, dropout, sides: as in `forward_in_blocks`.
        out: the output of attention to all keys, in the shape of `q`.
        lse: its log-sum-exp, `(batch, heads, queries)`.
        of_out: the gradient of `out`.
        of_lse: the gradient of `lse`; `None` for 0.
    """
    rate, key = (0.0, None) if dropout is None else dropout
    options = _Options(scale, soft_cap, rate, _sides(q, k, sides))
    operands = _varying_alike((q, k, v, rule, key, out, lse, of_out, of_lse))
    return as_one(functools.partial(_backward, options), *operands)


class _Options(NamedTuple):
    scale: float
    soft_cap: float | None
    dropout_rate: float
    sides: tuple[int, int]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_blocks(options: _Options, *operands: Any) -> tuple[jax.Array, jax.Array]:
    return _forward(options, *operands)


def _forward_and_saved(options: _Options, *operands: Any) -> Any:
    q, k, v, sinks, rule, key = operands
    out, lse = map(save_attention, as_one(functools.partial(_forward, options), *operands))
    return (out, lse), (q, k, v, sinks, rule, key, out, lse)


def _gradients(options: _Options, saved: Any, cotangents: tuple[jax.Array, jax.Array]) -> Any:
    q, k, v, sinks, rule, key, out, lse = saved
    backward = functools.partial(_backward, options)
    of_operands = as_one(backward, q, k, v, rule, key, out, lse, *cotangents)
    of_operands = tuple(g.astype(x.dtype) for g, x in zip(of_operands, (q, k, v), strict=True))
    of_sinks = None
    if sinks is not None:
        share = jnp.exp(sinks.astype(lse.dtype)[:, None] - _finite(lse))
        of_sinks = -jnp.sum(share * _along(out, *cotangents, lse.dtype), axis=(0, 2)).astype(sinks.dtype)
    return *of_operands, of_sinks, None, None


_in_blocks.defvjp(_forward_and_saved, _gradients)


def _forward(
    options: _Options, q: jax.Array, k: jax.Array, v: jax.Array, sinks: Any, rule: Rule, key: Any
) -> tuple[jax.Array, jax.Array]:
    batch, queries, heads, head_dim = q.shape
    wide, grouped = jnp.promote_types(q.dtype, jnp.float32), (batch, k.shape[2], heads // k.shape[2])
    blocks = _Blocks.of(options, q, k, v, rule, key)
    rows = (*grouped, blocks.padded[0])
    # The lowest finite number instead of -inf, because the difference of two scores must not be NaN.
    top, total = jnp.full(rows, jnp.finfo(wide).min, wide), jnp.zeros(rows, wide)
    if sinks is not None:
        logits = jnp.broadcast_to(jnp.reshape(sinks.astype(wide), (*grouped[1:], 1)), rows)
        top = jnp.maximum(logits, top)
        total = jnp.exp(logits - top)  # 1, or 0 if the sink is -inf
    mixed = jnp.zeros((*rows, head_dim), wide)

    def step(carry: Any, pair: jax.Array) -> tuple[Any, None]:
        top, total, mixed = (_take(x, pair[0], options.sides[0], 3) for x in carry)
        scores, _ = blocks.scores(pair)
        highest = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights, factor = jnp.exp(scores - highest[..., None]), jnp.exp(top - highest)
        total = total * factor + jnp.sum(weights, axis=-1)
        product = jnp.einsum(
            "bkgqs,bskd->bkgqd",
            (weights * blocks.kept(pair)).astype(v.dtype),
            blocks.values(pair),
            preferred_element_type=wide,
        )
        new = highest, total, mixed * factor[..., None] + product
        return tuple(_put(x, y, pair[0], 3) for x, y in zip(carry, new, strict=True)), None

    carry = _varying_alike((q, (top, total, mixed)))[1]
    (top, total, mixed), _ = lax.scan(jax.checkpoint(step, prevent_cse=False), carry, blocks.pairs)
    top, total, mixed = (x[:, :, :, :queries] for x in (top, total, mixed))
    empty = total == 0
    total = jnp.where(empty, 1, total)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))
    out = jnp.moveaxis(mixed / total[..., None], 3, 1)
    return jnp.reshape(out, q.shape).astype(q.dtype), jnp.reshape(lse, (batch, heads, queries))


def _backward(
    options: _Options,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rule: Rule,
    key: Any,
    out: jax.Array,
    lse: jax.Array,
    of_out: jax.Array,
    of_lse: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    kv_heads, sides = k.shape[2], options.sides
    wide = jnp.promote_types(q.dtype, jnp.float32)
    blocks = _Blocks.of(options, q, k, v, rule, key)
    (batch, queries, heads, head_dim), (rows, columns) = q.shape, blocks.padded
    grouped = (batch, kv_heads, heads // kv_heads)
    lse, along = (
        _padded(jnp.reshape(x, (*grouped, queries)), rows, 3)
        for x in (_finite(lse).astype(wide), _along(out, of_out, of_lse, wide))
    )
    given = _padded(_by_group(of_out, kv_heads), rows, 1).astype(v.dtype)

    # Computed again in a second derivative, which would otherwise keep the weights of all blocks.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_block(pair: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        own = _take(given, pair[0], sides[0], 1)
        scores, slope = blocks.scores(pair)
        weights, kept = jnp.exp(scores - _take(lse, pair[0], sides[0], 3)[..., None]), blocks.kept(pair)
        product = functools.partial(jnp.einsum, preferred_element_type=wide)
        towards = product("bqkgd,bskd->bkgqs", own, blocks.values(pair)) * kept
        of_scores = weights * (towards - _take(along, pair[0], sides[0], 3)[..., None]) * slope * options.scale
        return (
            product("bkgqs,bskd->bkgqd", of_scores.astype(k.dtype), blocks.keys(pair)),
            product("bkgqs,bqkgd->bksd", of_scores.astype(q.dtype), blocks.queries(pair)),
            product("bkgqs,bqkgd->bksd", (weights * kept).astype(own.dtype), own),
        )

    def step(sums: Any, pair: jax.Array) -> tuple[Any, None]:
        parts, places = of_block(pair), ((pair[0], 3), (pair[1], 2), (pair[1], 2))
        return tuple(
            _put(x, _take(x, index, part.shape[axis], axis) + part, index, axis)
            for x, part, (index, axis) in zip(sums, parts, places, strict=True)
        ), None

    of_q = jnp.zeros((*grouped, rows, head_dim), wide)
    of_k = of_v = jnp.zeros((batch, kv_heads, columns, head_dim), wide)
    sums = _varying_alike((q, (of_q, of_k, of_v)))[1]
    (of_q, of_k, of_v), _ = lax.scan(step, sums, blocks.pairs)
    of_q = jnp.reshape(jnp.moveaxis(of_q[:, :, :, :queries], 3, 1), q.shape)
    of_k, of_v = (jnp.swapaxes(x[:, :, : k.shape[1]], 1, 2) for x in (of_k, of_v))
    return of_q, of_k, of_v


class _Blocks(NamedTuple):
    """The operands of attention, padded to whole blocks, and the pairs of blocks that are computed."""

    options: _Options
    lengths: tuple[int, int]
    padded: tuple[int, int]
    pairs: jax.Array
    operands: tuple[jax.Array, jax.Array, jax.Array]
    rule: Rule
    key: Any

    @classmethod
    def of(cls, options: _Options, q: jax.Array, k: jax.Array, v: jax.Array, rule: Rule, key: Any) -> _Blocks:
        lengths, sides = (q.shape[1], k.shape[1]), options.sides
        rows, columns = (-(-length // side) * side for length, side in zip(lengths, sides, strict=True))
        if rule.mask is not None:
            mask = rule.mask if rule.mask.shape[-2] == 1 else _padded(rule.mask, rows, -2)
            rule = dataclasses.replace(rule, mask=_padded(mask, columns, -1))
        if rule.segments is not None:
            of_queries, of_keys = rule.segments
            rule = dataclasses.replace(rule, segments=(_padded(of_queries, rows, 1), _padded(of_keys, columns, 1)))
        operands = _padded(_by_group(q, k.shape[2]), rows, 1), _padded(k, columns, 1), _padded(v, columns, 1)
        return cls(options, lengths, (rows, columns), _pairs(lengths, sides, rule), operands, rule, key)

    def queries(self, pair: jax.Array) -> jax.Array:
        return _take(self.operands[0], pair[0], self.options.sides[0], 1)

    def keys(self, pair: jax.Array) -> jax.Array:
        return _take(self.operands[1], pair[1], self.options.sides[1], 1)

    def values(self, pair: jax.Array) -> jax.Array:
        return _take(self.operands[2], pair[1], self.options.sides[1], 1)

    def scores(self, pair: jax.Array) -> tuple[jax.Array, jax.Array | float]:
        """Returns the scores, `(batch, kv_heads, group, queries, keys)`, -inf where a query may not attend; and the
        derivative of the scores with respect to what the soft cap is applied to."""
        q, k = self.queries(pair), self.keys(pair)
        wide = jnp.promote_types(q.dtype, jnp.float32)
        scores, slope = jnp.einsum("bqkgd,bskd->bkgqs", q, k, preferred_element_type=wide) * self.options.scale, 1.0
        if (cap := self.options.soft_cap) is not None:
            capped = jnp.tanh(scores / cap)
            scores, slope = cap * capped, 1 - capped**2
        allowed = self._allowed(pair)
        return (scores if allowed is None else jnp.where(by_group(allowed, k.shape[2]), scores, -jnp.inf)), slope

    def _allowed(self, pair: jax.Array) -> jax.Array | None:
        (rows, columns), rule = self.options.sides, self.rule
        mask, segments = rule.mask, rule.segments
        if mask is not None:
            mask = mask if mask.shape[-2] == 1 else _take(mask, pair[0], rows, -2)
            mask = _take(mask, pair[1], columns, -1)
        if segments is not None:
            segments = tuple(_take(x, pair[n], self.options.sides[n], 1) for n, x in enumerate(segments))
        first = pair[0] * rows - pair[1] * columns + rule.first + (0 if rule.shift is None else rule.shift)
        allowed = both(allowed_by(mask, segments), in_order(rows, columns, rule.causal, rule.window, first))
        if self.padded[1] > self.lengths[1]:
            there = (pair[1] * columns + jnp.arange(columns) < self.lengths[1])[None, None, None]
            allowed = both(allowed, there)
        return allowed

    def kept(self, pair: jax.Array) -> jax.Array | float:
        """Returns the factor that dropout gives to each weight."""
        if not self.options.dropout_rate:
            return 1.0
        (batch, _, kv_heads, group, _), share = self.operands[0].shape, 1 - self.options.dropout_rate
        key = jax.random.fold_in(self.key, pair[0] * (self.padded[1] // self.options.sides[1]) + pair[1])
        return jax.random.bernoulli(key, share, (batch, kv_heads, group, *self.options.sides)) / share


def _sides(q: jax.Array, k: jax.Array, sides: tuple[int, int] | None) -> tuple[int, int]:
    """Returns the sides of blocks: the fewest blocks of equal size whose sides are not above the largest."""
    if sides is None:
        side = 2 ** int(math.log2(_ELEMENTS / max(1, q.shape[0] * q.shape[2])) / 2)
        sides = (min(max(side, _SMALLEST), _LARGEST),) * 2
    return _side(q.shape[1], sides[0]), _side(k.shape[1], sides[1])


def _side(length: int, largest: int) -> int:
    side = -(-length // -(-length // largest))
    return min(length, -(-side // _SMALLEST) * _SMALLEST) if largest % _SMALLEST == 0 else side


def _pairs(lengths: tuple[int, int], sides: tuple[int, int], rule: Rule) -> jax.Array:
    """Returns the pairs of a block of queries and a block of keys in which some query may attend to some key, `(pairs,
    2)`, as far as this is known without the values of arrays."""
    of_queries, of_keys = (np.arange(0, length, side) for length, side in zip(lengths, sides, strict=True))
    rows, columns = of_queries[:, None] + rule.first, of_keys[None]
    last_row = np.minimum(of_queries + sides[0], lengths[0])[:, None] - 1 + rule.first
    last_column = np.minimum(of_keys + sides[1], lengths[1])[None] - 1
    seen = np.ones((len(of_queries), len(of_keys)), bool)
    if rule.shift is None:
        if rule.causal:
            seen &= columns <= last_row
        if rule.window is not None:
            seen &= (rows - last_column < rule.window) & (columns - last_row < rule.window)
    return jnp.asarray(np.argwhere(seen), jnp.int32)


def _finite(lse: jax.Array) -> jax.Array:
    """Replaces -inf by 0. With any finite number, a query that sees no key has weights of 0; with -inf, NaN."""
    return jnp.where(jnp.isneginf(lse), 0, lse)


def _along(out: jax.Array, of_out: jax.Array, of_lse: jax.Array | None, dtype: Any) -> jax.Array:
    """Returns how much the loss changes if the logarithms of all weights of a query grow by the same amount, `(batch,
    heads, queries)`. It is subtracted from the gradient of each weight."""
    along = jnp.swapaxes(jnp.sum(out.astype(dtype) * of_out.astype(dtype), axis=-1), 1, 2)
    return along if of_lse is None else along - of_lse.astype(dtype)


def _by_group(x: jax.Array, kv_heads: int) -> jax.Array:
    batch, length, heads, head_dim = x.shape
    return jnp.reshape(x, (batch, length, kv_heads, heads // kv_heads, head_dim))


def _padded(x: jax.Array, length: int, axis: int) -> jax.Array:
    missing = length - x.shape[axis]
    widths = [(0, missing if n == axis % x.ndim else 0) for n in range(x.ndim)]
    return jnp.pad(x, widths) if missing else x


def _take(x: jax.Array, index: jax.Array, side: int, axis: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, index * side, side, axis)


def _put(x: jax.Array, block: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, block, index * block.shape[axis], axis)


def _varying_alike[Tree](tree: Tree) -> Tree:
    """Casts arrays to vary over the same mesh axes, as loops require in a `shard_map` that checks this."""
    axes = frozenset().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(tree)))

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - jax.typeof(x).mat.varying))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)
