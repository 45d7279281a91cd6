"""Rows in another order."""

from __future__ import annotations

import jax


@jax.custom_vjp
def permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns `x[order]`, whose gradient is `gradient[inverse]`: a gather too, where autodiff would scatter row by row.

    Args:
        x: `(rows, ...)`.
        order: a permutation of the rows.
        inverse: its inverse, `argsort(order)`.
    """
    del inverse
    return x[order]


def _fwd(x: jax.Array, order: jax.Array, inverse: jax.Array):
    return x[order], inverse


def _bwd(inverse: jax.Array, gradient: jax.Array):
    return gradient[inverse], None, None


permute.defvjp(_fwd, _bwd)
