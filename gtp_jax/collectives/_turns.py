"""Orders collectives that do not depend on one another. Called inside a `shard_map`.

XLA combines collectives of the same ranks that are ready at the same time into one launch, and runs all launches one
after another on one stream. A turn is a number, always 0, that is available only after another operation has completed.
A collective that is tied to the turn can neither be combined with that operation nor start before it.

A chain gives each layer a turn with `use_turn`. In forward, the turn follows the gather of the next layer's weights, so
that an exchange of tokens begins on an idle stream. In backward, the gradient of the turn follows the layer's last
exchange, and the weights that a chain gathers and reduces during that layer wait for it. So in both passes, weights are
sent during attention, and tokens during the experts.
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
    """Returns a turn that is available only after these values are."""
    leaves = [leaf for leaf in jax.tree.leaves(values) if leaf.dtype != jax.dtypes.float0]
    return lax.optimization_barrier((no_turn(), leaves))[0]


def tied(value: Any, turn: Turn) -> Any:
    """Returns the value unchanged, but not before a turn is available.

    XLA removes an operand of a barrier whose output is not used, and the tie with it, unless something else reads the
    operand. Therefore two barriers read the same turn.
    """
    for _ in range(2):
        value, _ = lax.optimization_barrier((value, turn))
    return value


@jax.custom_jvp
def at_once(one: Any, other: Any) -> tuple[Any, Any]:
    """Returns two pytrees of arrays, neither of which is available before the other. Their derivatives are not tied,
    because JAX (0.12) cannot transpose a barrier with a constant operand, such as a zero tangent."""
    return lax.optimization_barrier((one, other))


at_once.defjvp(lambda primals, tangents: (at_once(*primals), tangents))


@jax.custom_vjp
def in_turn(x: Any, turn: Turn) -> Any:
    """Returns `x`, a pytree of arrays, but not before a turn is available. The gradient of the turn is available only
    after that of `x`."""
    return tied(x, turn)


def _in_turn_fwd(x: Any, turn: Turn) -> tuple[Any, None]:
    return tied(x, turn), None


def _in_turn_bwd(_: None, gradient: Any) -> tuple[Any, Turn]:
    return gradient, turn_after(gradient)


in_turn.defvjp(_in_turn_fwd, _in_turn_bwd)


@contextlib.contextmanager
def use_turn(turn: Turn | None) -> Iterator[None]:
    """Puts the turn of a layer in scope; `None` for no turn, as within a layer's own `shard_map`."""
    token = _OF_LAYER.set(turn)
    try:
        yield
    finally:
        _OF_LAYER.reset(token)


def turn_in_scope() -> Turn:
    """Returns the turn of the layer, or one that follows nothing if there is none in scope."""
    turn = _OF_LAYER.get()
    return no_turn() if turn is None else turn
