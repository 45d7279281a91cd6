"""The two programs of generation: one processes the prompts, the other adds up to 16 tokens to each row."""

from __future__ import annotations

import dataclasses
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

# The maximum number of tokens that one call of `decode` adds to a row.
STEPS = 16

# Fills the places after the end of a row.
NO_TOKEN = -1


class Rows(NamedTuple):
    """The progress of the rows of a batch.

    Attributes:
        tokens: the latest token of each row, `(batch,)`, which is not in the caches yet.
        places: the position of that token in its row, `(batch,)`.
        last: the position of the last token that may be generated in each row, `(batch,)`.
        done: whether each row has ended, `(batch,)`.
        broken: whether any logits of each row were NaN, `(batch,)`.
    """

    tokens: jax.Array
    places: jax.Array
    last: jax.Array
    done: jax.Array
    broken: jax.Array


@dataclasses.dataclass(frozen=True)
class Request:
    """The static arguments for which a program is compiled.

    The hash is cached, because the hash of a graph takes milliseconds and every call of a program needs it.

    Attributes:
        graph: the model's graph definition.
        tree: the tree structure of the model's state. A program takes the state's arrays as a list, because flattening
            a state in every call would take a millisecond.
        choice: the way in which a token is chosen.
        slots: the number of tokens for which a cache has room.
        gathers: whether weights are gathered for every token. `decode` then keeps XLA from hoisting gathers out of the
            loop.
    """

    graph: Any
    tree: Any
    choice: Choice
    slots: int
    gathers: bool

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.graph, self.tree, self.choice, self.slots, self.gathers))


@functools.partial(jax.jit, static_argnames=("request",))
def prefill(
    request: Request,
    arrays: list[jax.Array],
    tokens: jax.Array,
    lengths: jax.Array,
    last: jax.Array,
    stop: jax.Array,
    sampling: Sampling,
) -> tuple[Rows, Caches]:
    """Processes the prompts in one forward pass, and chooses the first new token of each row.

    Args:
        request: the static arguments.
        arrays: the arrays of the model's state.
        tokens: the prompts, `(batch, length)`; the tokens after the end of a prompt are arbitrary.
        lengths: the number of tokens of each prompt, `(batch,)`; 0 for padding rows, which count as ended.
        last: the position of the last token that may be generated in each row, `(batch,)`.
        stop: the tokens that end a row.
        sampling: the parameters of sampling.

    Returns:
        The progress of the rows, and their caches.
    """
    model = _model(request, arrays)
    ends = jnp.maximum(lengths - 1, 0)
    put_caches(model, make_caches(model, len(tokens), request.slots), filled=False)
    places = jnp.minimum(jnp.arange(tokens.shape[1]), ends[:, None])
    logits = _logits(model, tokens, places, ends)
    rows = Rows(tokens[:, -1], ends, last, lengths == 0, jnp.zeros(len(tokens), bool))
    return _whole(_with_next(rows, logits, request.choice, stop, sampling)), taken_caches(model)


@functools.partial(jax.jit, static_argnames=("request",), donate_argnames=("caches",))
def decode(
    request: Request, arrays: list[jax.Array], rows: Rows, caches: Caches, stop: jax.Array, sampling: Sampling
) -> tuple[Rows, Caches, jax.Array]:
    """Adds up to `STEPS` tokens to every row that has not ended.

    Args:
        request: the static arguments.
        arrays: the arrays of the model's state.
        rows: the progress of the rows.
        caches: the caches of all tokens except the latest; donated.
        stop: the tokens that end a row.
        sampling: the parameters of sampling.

    Returns:
        The new progress of the rows; their caches; and the new tokens, `(batch, STEPS)`, with `NO_TOKEN` after the end
        of a row.
    """

    def more(carry: tuple[jax.Array, Rows, Caches, jax.Array]) -> jax.Array:
        step, rows, _, _ = carry
        return (step < STEPS) & ~jnp.all(rows.done)

    def one(carry: tuple[jax.Array, Rows, Caches, jax.Array]) -> tuple[jax.Array, Rows, Caches, jax.Array]:
        step, rows, caches, made = carry
        own, rows = lax.optimization_barrier((arrays, rows)) if request.gathers else (arrays, rows)
        model = _model(request, own)
        put_caches(model, caches, filled=True)
        logits = _logits(model, rows.tokens[:, None], rows.places[:, None], jnp.zeros_like(rows.places))
        after = _whole(_with_next(rows, logits, request.choice, stop, sampling))
        new = jnp.where(rows.done, NO_TOKEN, after.tokens)
        return step + 1, after, taken_caches(model), lax.dynamic_update_slice_in_dim(made, new[:, None], step, axis=1)

    made = jnp.full((len(rows.tokens), STEPS), NO_TOKEN, jnp.int32)
    _, rows, caches, made = lax.while_loop(more, one, (jnp.int32(0), rows, caches, made))
    # shards outputs like inputs, so that the next call needs no recompilation
    return _whole(rows), placed(_model(request, arrays), caches), _whole(made)


@jax.jit
def with_ended(rows: Rows, ended: jax.Array) -> Rows:
    """Marks further rows as done: those for which `ended`, `(batch,)`, is true."""
    return _whole(rows._replace(done=rows.done | ended))


def _model(request: Request, arrays: list[jax.Array]) -> Any:
    """Returns the model with these arrays in new variables, so that a call may write them."""
    return nnx.merge(request.graph, jax.tree.unflatten(request.tree, arrays))


def _logits(model: Any, tokens: jax.Array, places: jax.Array, at: jax.Array) -> jax.Array:
    """Returns the logits of one token of each row, `(batch, vocab)`, given its index in `tokens`."""
    if "logits_at" in inspect.signature(type(model).__call__).parameters:
        return model(tokens, positions=places, logits_at=at)[:, 0]
    logits = model(tokens, positions=places)
    return jnp.take_along_axis(logits, at[:, None, None], axis=1)[:, 0]


def _with_next(rows: Rows, logits: jax.Array, choice: Choice, stop: jax.Array, sampling: Sampling) -> Rows:
    """Returns the rows with one more token; rows that have ended stay unchanged."""
    numbers, places = jnp.arange(len(rows.tokens)), rows.places + 1
    token = choose(logits, choice, sampling, numbers, places)
    ends = jnp.isin(token, stop) | (places >= rows.last)
    keep: Callable[..., jax.Array] = functools.partial(jnp.where, rows.done)
    broken = rows.broken | (~rows.done & jnp.any(jnp.isnan(logits), axis=-1))
    return Rows(keep(rows.tokens, token), keep(rows.places, places), rows.last, rows.done | ends | broken, broken)


def _whole(tree: Any) -> Any:
    """Returns a tree of small arrays, replicated on every device."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(lambda array: lax.with_sharding_constraint(array, PartitionSpec()), tree)
