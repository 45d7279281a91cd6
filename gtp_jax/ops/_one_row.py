"""Products of a single row, such as a token that is generated, as elementwise products and sums.

Such a product takes as long as reading its larger operand. On GPUs, XLA fuses an elementwise product and its sum
into one kernel, which reads faster than a matmul (docs/experiments.md).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..mesh import platform


def is_one_row(*leading: int) -> bool:
    """Returns whether dimensions of these sizes are a single row, and a GPU computes it."""
    return all(size == 1 for size in leading) and platform() == "gpu"


def one_row_einsum(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `jnp.einsum(equation, a, b)` as an elementwise product and a sum, both in at least float32.

    Args:
        equation: the dimensions of both operands and of the result, each written out, as in `"bk,nk->bn"`.
        a: the first operand.
        b: the second operand.
    """
    operands, out = equation.split("->")
    named = operands.split(",")
    letters = out + "".join(sorted(set(named[0] + named[1]) - set(out)))
    wide = jnp.promote_types(jnp.result_type(a, b), jnp.float32)

    def spread(x: jax.Array, own: str) -> jax.Array:
        x = jnp.transpose(x, [own.index(letter) for letter in letters if letter in own])
        return jnp.expand_dims(x, [i for i, letter in enumerate(letters) if letter not in own]).astype(wide)

    return jnp.sum(spread(a, named[0]) * spread(b, named[1]), axis=range(len(out), len(letters)))
