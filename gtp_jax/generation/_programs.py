"""The two programs of generation: one reads the prompts, the other adds up to 16 tokens to each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from ._caches import Caches, make_caches, placed, put_caches, taken_caches
from ._sampling import Choice, Sampling, choose

# Tokens that one call of the second program adds to a row at most.
STEPS = 16

# Stands for the tokens behind the end of a row.
NO_TOKEN = -1


class Rows(NamedTuple):
    """Where the rows of a batch are.

    Attributes:
        tokens: `(batch,)`, the latest token of each, which has not been computed with.
        places: `(batch,)`, its place in its row.
        last: `(batch,)`, the place of the last token that may be generated.
        done: `(batch,)`, whether a row has ended.
        broken: `(batch,)`, whether logits of a row were NaN.
    """

    tokens: jax.Array
    places: jax.Array
    last: jax.Array
    done: jax.Array
    broken: jax.Array


class Request(NamedTuple):
    """What a program is specialised to.

    Attributes:
        graph: the model's modules.
        choice: how a token is chosen.
        slots: tokens that a cache has room for.
        gathers: whether weights are gathered for every token. XLA could otherwise gather some ahead of the loop.
    """

    graph: Any
    choice: Choice
    slots: int
    gathers: bool


@functools.partial(jax.jit, static_argnames=("request",))
def prefill(
    request: Request,
    state: Any,
    tokens: jax.Array,
    lengths: jax.Array,
    last: jax.Array,
    stop: jax.Array,
    sampling: Sampling,
) -> tuple[Rows, Caches]:
    """Computes the prompts at once, and chooses the first new token of each row.

    Args:
        request: what is compiled.
        state: the model's variables.
        tokens: `(batch, length)`; what is behind a prompt may be any token.
        lengths: `(batch,)` of the prompts; 0 for rows that fill the batch up, which have ended already.
        last: as in `Rows`.
        stop: tokens that end a row.
        sampling: how tokens are chosen.
    """
    model = _model(request, state)
    ends = jnp.maximum(lengths - 1, 0)
    put_caches(model, make_caches(model, len(tokens), request.slots), filled=False)
    places = jnp.minimum(jnp.arange(tokens.shape[1]), ends[:, None])
    logits = _logits(model, tokens, places, ends)
    rows = Rows(tokens[:, -1], ends, last, lengths == 0, jnp.zeros(len(tokens), bool))
    return _whole(_with_next(rows, logits, request.choice, stop, sampling)), taken_caches(model)


@functools.partial(jax.jit, static_argnames=("request",), donate_argnames=("caches",))
def decode(
    request: Request, state: Any, rows: Rows, caches: Caches, stop: jax.Array, sampling: Sampling
) -> tuple[Rows, Caches, jax.Array]:
    """Adds tokens to every row until it ends, at most `STEPS`.

    Args:
        request: what is compiled.
        state: the model's variables.
        rows: where rows are.
        caches: of all tokens but the latest; donated.
        stop: tokens that end a row.
        sampling: how tokens are chosen.

    Returns:
        Where rows are now; their caches; and the new tokens, `(batch, STEPS)`, `NO_TOKEN` behind the end of a row.
    """

    def more(carry: tuple[jax.Array, Rows, Caches, jax.Array]) -> jax.Array:
        step, rows, _, _ = carry
        return (step < STEPS) & ~jnp.all(rows.done)

    def one(carry: tuple[jax.Array, Rows, Caches, jax.Array]) -> tuple[jax.Array, Rows, Caches, jax.Array]:
        step, rows, caches, made = carry
        own, rows = lax.optimization_barrier((state, rows)) if request.gathers else (state, rows)
        model = _model(request, own)
        put_caches(model, caches, filled=True)
        logits = _logits(model, rows.tokens[:, None], rows.places[:, None], jnp.zeros_like(rows.places))
        after = _whole(_with_next(rows, logits, request.choice, stop, sampling))
        new = jnp.where(rows.done, NO_TOKEN, after.tokens)
        return step + 1, after, taken_caches(model), lax.dynamic_update_slice_in_dim(made, new[:, None], step, axis=1)

    made = jnp.full((len(rows.tokens), STEPS), NO_TOKEN, jnp.int32)
    _, rows, caches, made = lax.while_loop(more, one, (jnp.int32(0), rows, caches, made))
    # what leaves is sharded like what came, so that the next call needs no other program
    return _whole(rows), placed(_model(request, state), caches), _whole(made)


def _model(request: Request, state: Any) -> Any:
    """Returns the model with these values in variables of its own, which a call may write."""
    return nnx.merge(request.graph, jax.tree.map(lambda array: array, state))


def _logits(model: Any, tokens: jax.Array, places: jax.Array, at: jax.Array) -> jax.Array:
    """Returns the logits at one place of each row, `(batch, vocab)`."""
    if "logits_at" in inspect.signature(type(model).__call__).parameters:
        return model(tokens, positions=places, logits_at=at)[:, 0]
    logits = model(tokens, positions=places)
    return jnp.take_along_axis(logits, at[:, None, None], axis=1)[:, 0]


def _with_next(rows: Rows, logits: jax.Array, choice: Choice, stop: jax.Array, sampling: Sampling) -> Rows:
    """Returns rows with one more token, but for those that have ended."""
    numbers, places = jnp.arange(len(rows.tokens)), rows.places + 1
    token = choose(logits, choice, sampling, numbers, places)
    ends = jnp.isin(token, stop) | (places >= rows.last)
    keep: Callable[..., jax.Array] = functools.partial(jnp.where, rows.done)
    broken = rows.broken | (~rows.done & jnp.any(jnp.isnan(logits), axis=-1))
    return Rows(keep(rows.tokens, token), keep(rows.places, places), rows.last, rows.done | ends | broken, broken)


def _whole(tree: Any) -> Any:
    """Returns small arrays, whole on every device."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(lambda array: lax.with_sharding_constraint(array, PartitionSpec()), tree)
