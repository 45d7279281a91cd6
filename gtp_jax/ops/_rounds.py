"""A sum over rounds of the same computation, of which one is usually enough."""

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

    The first round is traced into the program like other code, and saves residuals for backward according to the remat
    policy. Further rounds run in a loop and save none: backward recomputes them, and adds their gradients to those of
    the first round. While one round is enough, each loop costs only the check of its condition.

    Args:
        function: a function that closes over no traced array. It must not communicate with other ranks, because ranks
            have different numbers of rounds.
        operands: a pytree of float arrays, which have gradients.
        constants: a pytree of arrays, which have no gradients.
        rounds: int32, at least 1.
    """
    return _fwd(function, operands, constants, rounds)[0]


def _fwd(function: Callable[..., jax.Array], operands: Tree, constants: Tree, rounds: jax.Array):
    first, vjp = jax.vjp(lambda operands: function(0, operands, constants), operands)

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        # forward mode cannot differentiate a call of a `jax.custom_vjp` function, but `jax.vjp` replaces such calls
        # with their forward rules
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
