"""The order of collectives that do not depend on one another. Called inside a `shard_map`.

XLA joins collectives of the same ranks that are ready at the same time into one launch, and runs all launches one
after another on one stream. A turn is a number, always 0, that exists only once something else has happened: what is
tied to it can neither be joined with that nor start ahead of it.

A chain hands each layer a turn with `use_turn`. In forward it follows the gather of the next layer's weights, so that
an exchange of tokens begins on an idle stream; in backward its gradient follows the layer's last exchange, and what a
chain gathers and reduces under that layer waits for it. So weights travel under attention in both passes, and tokens
under experts.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Turn = jax.Array

_OF_LAYER: contextvars.ContextVar[Turn | None] = contextvars.ContextVar("turn_of_layer", default=None)


def no_turn() -> Turn:
    """Returns a turn that follows nothing."""
    return jnp.zeros((), jnp.float32)


def turn_after(*values: Any) -> Turn:
    """Returns a turn that exists once these values do."""
    leaves = [leaf for leaf in jax.tree.leaves(values) if leaf.dtype != jax.dtypes.float0]
    return lax.optimization_barrier((no_turn(), leaves))[0]


def tied(value: Any, turn: Turn) -> Any:
    """Returns the same, no sooner than a turn.

    Of what is tied together XLA drops what has no other reader, and with it the tie: hence two of them.
    """
    for _ in range(2):
        value, _ = lax.optimization_barrier((value, turn))
    return value


@jax.custom_vjp
def in_turn(x: jax.Array, turn: Turn) -> jax.Array:
    """Returns `x`, no sooner than a turn. The turn's gradient exists once that of `x` does."""
    return tied(x, turn)


def _in_turn_fwd(x: jax.Array, turn: Turn) -> tuple[jax.Array, None]:
    return tied(x, turn), None


def _in_turn_bwd(_: None, gradient: jax.Array) -> tuple[jax.Array, Turn]:
    return gradient, turn_after(gradient)


in_turn.defvjp(_in_turn_fwd, _in_turn_bwd)


@contextlib.contextmanager
def use_turn(turn: Turn | None) -> Iterator[None]:
    """Puts a layer's turn in scope; `None` for none, as within a `shard_map` of a layer's own."""
    token = _OF_LAYER.set(turn)
    try:
        yield
    finally:
        _OF_LAYER.reset(token)


def turn_in_scope() -> Turn:
    """Returns the layer's turn; one that follows nothing if a chain gave none."""
    turn = _OF_LAYER.get()
    return no_turn() if turn is None else turn
