"""The matmul of every dense layer."""

from __future__ import annotations

import jax
from jax import lax


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight.T`: `(..., features_in)` and `(features_out, features_in)` to `(..., features_out)`.

    Output features come first because that is how slices lie after a gather: rank after rank, with no copy.
    """
    return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
