"""Causal attention over sequences that ranks divide, with the same work on every rank. Called inside a `shard_map`.

A rank's own keys need no exchange. Each half of its queries attends causally to its half of the keys; this is computed
while keys and values are gathered, and halves of queries travel to the ranks that work on them (`_halves`). The second
half also attends to the first half of the keys; this is computed while results for the parts of other ranks travel
back. Results for several parts of the keys are merged by the log-sum-exp of their scores. Backward has the same order:
queries travel with outputs and their gradients, and gradients travel back. Sums are in at least float32.

XLA has one collective in flight at a time. It would wait for what is sent before it computes anything. So barriers tie
the results of each transfer to those of the attention that is computed meanwhile.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from ..mesh import degree
from ..ops import attention_backward, attention_with_lse, save_attention
from ._halves import at_home, at_worker, send_home, send_terms_home, send_to_workers, work
from ._over_gloo import all_gather, reduce_scatter
from ._turns import Turn, at_once, tied, turn_after


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def balanced_attention(
    q: Float[jax.Array, "batch part heads head_dim"],
    k: Float[jax.Array, "batch part kv_heads head_dim"],
    v: Float[jax.Array, "batch part kv_heads head_dim"],
    turn: Turn,
    axis: str,
    scale: float,
) -> Float[jax.Array, "batch part heads head_dim"]:
    """Returns this rank's part of causal attention over whole sequences.

    Args:
        q, k, v: this rank's part of queries, keys and values; an even number of tokens.
        turn: the turn in which this rank sends.
        axis: the mesh axis that divides sequences.
        scale: the factor of the scores.
    """
    return _forward(q, k, v, turn, axis, scale)[0]


def _with_residuals(q: jax.Array, k: jax.Array, v: jax.Array, turn: Turn, axis: str, scale: float) -> Any:
    # remat policies save the results of `jax.nn.dot_product_attention`, so they must save these too
    out, lse = map(save_attention, _forward(q, k, v, turn, axis, scale))
    return out, (q, k, v, out, lse)


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, turn: Turn, axis: str, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Returns this rank's part of the result, and the log-sum-exp of its scores, `(batch, heads, part)`."""
    attend = functools.partial(attention_with_lse, scale=scale)
    sent = send_to_workers(tied(q, turn), axis, 1)
    kv = [_parts(x, axis) for x in _behind(sent, tied((k, v), turn), axis)]
    own = attend(*(_as_examples(x, 1) for x in (q, k, v)), causal=True)
    own, (arrived, kv) = at_once(own, (sent, kv))
    halves = at_worker(arrived, axis)

    def add(n: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        half, part = work(axis, n)
        total = _merged((sums[0][half], sums[1][half]), attend(halves[half], *(x[part] for x in kv), causal=False))
        return _put(sums[0], half, total[0]), _put(sums[1], half, total[1])

    none = jnp.zeros_like(wide(halves)), jnp.full_like(jnp.reshape(own[1], (2, -1, *own[1].shape[1:])), -jnp.inf)
    (out, lse), later = at_once(lax.fori_loop(0, degree(axis) - 1, add, none), _second_to_first(q, k, v))
    # other ranks' results are rounded once, as those of the kernels are
    sent = send_home(out.astype(q.dtype), axis), send_home(lse, axis)
    across, arrived = at_once(attend(*later, causal=False), sent)

    firsts, seconds = zip(*map(_halves_of_examples, own), strict=True)
    of_others = zip(*(at_home(x, axis) for x in arrived), strict=True)
    results = [_merged(one, other) for one, other in zip((firsts, _merged(seconds, across)), of_others, strict=True)]
    out, lse = (jnp.concatenate(x, axis=dim) for dim, x in zip((1, 2), zip(*results, strict=True), strict=True))
    return out.astype(q.dtype), lse


def _backward(axis: str, scale: float, saved: Any, of_out: jax.Array) -> Any:
    q, k, v, out, lse = saved
    differentiate = functools.partial(attention_backward, scale=scale)
    # otherwise XLA would gather keys and values once, and keep them from forward to backward
    kv = tied((k, v), turn_after(of_out))
    sent = [send_to_workers(x, axis, 2) for x in (jnp.stack([q, out, of_out]), lse)]
    *of_tokens, of_examples = (_as_examples(x, 1) for x in (q, k, v, out, of_out))
    own = differentiate(*of_tokens, lse=_as_examples(lse, 2), of_out=of_examples, causal=True)
    own, (arrived, kv) = at_once(own, (sent, [_parts(x, axis) for x in _behind(sent, kv, axis)]))
    halves, statistics = (at_worker(x, axis) for x in arrived)

    def add(n: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        half, part = work(axis, n)
        (q, out, of_out), (k, v) = halves[half], (x[part] for x in kv)
        terms = differentiate(q, k, v, out, statistics[half], of_out, causal=False)
        return tuple(_put(x, at, x[at] + one) for x, at, one in zip(sums, (half, part, part), terms, strict=True))

    zeros = tuple(jnp.zeros_like(wide(x)) for x in (halves[:, 0], *kv))
    later = *_second_to_first(q, k, v), *(jnp.split(x, 2, axis=dim)[1] for x, dim in ((out, 1), (lse, 2), (of_out, 1)))
    (of_q, *of_kv), later = at_once(lax.fori_loop(0, degree(axis) - 1, add, zeros), later)
    of_q = send_terms_home(of_q, axis, q.dtype)
    of_kv = [reduce_scatter(x, axis, dim=0) for x in _behind(of_q, of_kv, axis)]
    across, (of_q, of_kv) = at_once(differentiate(*later, causal=False), (of_q, of_kv))
    of_others = of_q, *(jnp.split(x[0], 2, axis=1) for x in of_kv)

    sums = []
    for x, of_own, others, term, second in zip((q, k, v), own, of_others, across, (1, 0, 0), strict=True):
        both = [wide(one) + other for one, other in zip(_halves_of_examples(of_own), others, strict=True)]
        both[second] += term
        sums.append(jnp.concatenate(both, axis=1).astype(x.dtype))
    return *sums, turn_after(of_q, of_kv)


balanced_attention.defvjp(_with_residuals, _backward)


def _parts(x: jax.Array, axis: str) -> jax.Array:
    """Returns the parts of all ranks, `(ranks, ...)`."""
    return all_gather(x[None], axis, dim=0)


def _behind(sent: Any, value: Any, axis: str) -> Any:
    """Returns a value that is to be sent, but not before halves have arrived: XLA overlaps only the last launch with
    compute that is tied to all launches. Between two ranks, both are one launch."""
    return value if degree(axis) == 2 else tied(value, turn_after(sent))


def _as_examples(x: jax.Array, dim: int) -> jax.Array:
    """Returns the two halves along a dimension as examples of their own, `(2 * batch, ...)`."""
    apart = jnp.reshape(x, (*x.shape[:dim], 2, x.shape[dim] // 2, *x.shape[dim + 1 :]))
    apart = jnp.moveaxis(apart, dim, 1)
    return jnp.reshape(apart, (-1, *apart.shape[2:]))


def _halves_of_examples(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two halves that `_as_examples` put side by side."""
    apart = jnp.reshape(x, (-1, 2, *x.shape[1:]))
    return apart[:, 0], apart[:, 1]


def _second_to_first(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the second half of the queries, and the first half of the keys and values."""
    half = q.shape[1] // 2
    return q[:, half:], k[:, :half], v[:, :half]


def _put(x: jax.Array, at: jax.Array, value: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, value, at, 0)


def _merged(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Merges the results for two sets of keys, of which one may be empty, into that for all of them. A result is an
    output, `(batch, queries, heads, head_dim)`, and the log-sum-exp of its scores, `(batch, heads, queries)`."""
    lse = jnp.logaddexp(one[1], other[1])
    mine, others = (jnp.swapaxes(jnp.exp(own - lse), 1, 2)[..., None] * wide(out) for out, own in (one, other))
    return mine + others, lse


def wide(x: jax.Array) -> jax.Array:
    """Returns the array in the dtype in which sums are computed: its own, or float32 if that is narrower."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
