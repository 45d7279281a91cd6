"""Rows in another order."""

from __future__ import annotations

import jax
from jaxtyping import Int, Shaped


@jax.custom_vjp
def permute(
    x: Shaped[jax.Array, "rows ..."], order: Int[jax.Array, " rows"], inverse: Int[jax.Array, " rows"]
) -> Shaped[jax.Array, "rows ..."]:
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
