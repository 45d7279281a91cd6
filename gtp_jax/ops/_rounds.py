"""A sum of equal rounds, of which usually one is enough."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Tree = Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_rounds(
    function: Callable[[Any, Tree, Tree], jax.Array], operands: Tree, constants: Tree, rounds: jax.Array
) -> jax.Array:
    """Returns the sum over `round < rounds` of `function(round, operands, constants)`.

    The first round is traced into the program like any code, and leaves residuals for backward as a remat policy says.
    Further ones run in a loop and leave none: backward computes them again, and goes on with the sums that the first
    one has begun. As long as one round is enough, neither loop costs more than the question.

    Args:
        function: closes over no array that is traced. Its rounds may need no other rank: ranks have different numbers
            of them.
        operands: pytree of floats, which have gradients.
        constants: pytree of arrays, which have none.
        rounds: int32, at least 1.
    """
    return _fwd(function, operands, constants, rounds)[0]


def _fwd(function: Callable[..., jax.Array], operands: Tree, constants: Tree, rounds: jax.Array):
    first, vjp = jax.vjp(lambda operands: function(0, operands, constants), operands)

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        # by the rules of its derivative, which can be differentiated forward, as a `jax.custom_vjp` cannot
        return total + jax.vjp(lambda operands: function(i, operands, constants), operands)[0]

    total = lax.fori_loop(1, rounds, add, first)
    return total, (vjp, operands, constants, rounds)


def _bwd(function: Callable[..., jax.Array], saved: Tree, gradient: jax.Array):
    vjp, operands, constants, rounds = saved

    def add(i: jax.Array, sums: Tree) -> Tree:
        _, again = jax.vjp(lambda operands: function(i, operands, constants), operands)
        return jax.tree.map(jnp.add, sums, again(gradient))

    return *lax.fori_loop(1, rounds, add, vjp(gradient)), None, None


in_rounds.defvjp(_fwd, _bwd)
