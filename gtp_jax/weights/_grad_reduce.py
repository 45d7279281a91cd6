"""Defines the named ways of summing the gradients of a weight over the ranks that share it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._words import GRAD_REDUCE


class Reduction(NamedTuple):
    """The dtypes that a name of `GradReduce` stands for, in a module with a given compute dtype.

    Attributes:
        slot: the dtype in which the product returns a weight's gradient.
        sums: the dtype of a reduce-scatter, on the wire and of its sums.
        wire: the dtype that an all-to-all sends instead, to be summed in float32; `None` for a reduce-scatter.
    """

    slot: np.dtype
    sums: np.dtype
    wire: np.dtype | None


def reduction_of(name: str, dtype: jax.typing.DTypeLike) -> Reduction:
    """Returns the dtypes that a name stands for, in a module that computes in `dtype`.

    | name | product's dtype | on the wire | summed in |
    |---|---|---|---|
    | `"float32"` | float32 | float32, a reduce-scatter | float32 |
    | `"bf16-wire"` | float32 | bfloat16, an all-to-all: each rank's part is rounded once | float32 |
    | `"bf16"` | the compute dtype | bfloat16, a reduce-scatter | bfloat16: every partial sum is rounded |

    In a module that computes in float64, `"float32"` sends and sums in float64, and the product's dtype is float64.

    Raises:
        ValueError: if `name` is none of these.
    """
    if name not in GRAD_REDUCE:
        raise ValueError(
            f"`grad_reduce` is {name!r}; it must be one of {', '.join(map(repr, GRAD_REDUCE))}. Use 'float32' to sum "
            "weight gradients over the ranks exactly; the others send fewer bytes."
        )
    narrow = np.dtype(jnp.bfloat16)
    if name == "bf16":
        return Reduction(np.dtype(dtype), narrow, None)
    wide = np.dtype(jnp.promote_types(dtype, jnp.float32))
    return Reduction(wide, wide, narrow if name == "bf16-wire" else None)
