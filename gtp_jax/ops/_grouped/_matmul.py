"""The matmul of a layer of experts: each row times the kernel of its own group.

`jax.lax.ragged_dot` expresses the same, but XLA (jax 0.11.2, compiled for H200) computes it densely: it multiplies
every row by the kernel of every group, with the rows of other groups masked to zero. That takes `groups` times the
operations, and a copy of the operand per group. XLA's option for grouped GEMMs changes nothing on NVIDIA GPUs, and its
option for fusions crashes the compiler.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int32

from ...formats import QuantizedArray
from .._as_one import as_one
from .._implementation import Implementation
from .._save import save_for_backward
from .._slot import SlottedWeight, values_and_slot
from ._contract import GroupedMatmul, Problem
from ._table import pick


def grouped_matmul(
    x: Float[jax.Array, "rows features_in"],
    weight: Float[jax.Array, "shards groups part features_in"] | SlottedWeight,
    group_sizes: Int32[jax.Array, " groups"],
    *,
    implementation: Implementation | None = None,
) -> Float[jax.Array, "rows features_out"]:
    """Returns `y[row] = x[row] @ kernel[group of row].T`, for rows that are sorted by group.

    Operations are spent only on each row's own group, except for the padding of a group's last tile. Sums are computed
    in at least float32. `weight` itself is saved for backward, so that the caller that gathered it can drop it and
    gather it again.

    Args:
        x: `(rows, in)`.
        weight: `(shards, groups, part, in)`, in the dtype of `x`: for every shard of a gather, each group's part of the
            output features. With one shard, `(1, groups, out, in)`. The gradient of a slot has the slot's dtype.
        group_sizes: int32 `(groups,)`, the number of rows of each group, in order; may be 0.
        implementation: `"reference"` for XLA's own matmuls, tile by tile; `"native"` for kernels, which support
            bfloat16 and float16 on GPUs; or `None` for the best available.

    Returns:
        `(rows, shards * part)`, with the shards in order. Rows after the last group are zeros.

    Raises:
        ValueError: if shapes do not agree.
        TypeError: if `group_sizes` is not int32, the dtypes of `x` and `weight` differ, or `weight` is codes.
        NotImplementedError: if `implementation` is `"native"`, and there are no kernels for these operands.
    """
    values, slot = values_and_slot(weight)
    check_grouped(x, values, group_sizes)
    run = pick("grouped_matmul", implementation, Problem(values.shape, x.shape[0], x.dtype))
    return save_for_backward(_grouped_matmul(x, values, slot, group_sizes, run, slot.dtype))


def check_grouped(x: jax.Array, weight: jax.Array | QuantizedArray, group_sizes: jax.Array) -> None:
    """Checks the operands of a grouped matmul, whose weight may be codes; see `grouped_matmul`."""
    shape = weight.shape
    if x.ndim != 2 or len(shape) != 4 or shape[3] != x.shape[1]:
        raise ValueError(
            f"`x` has shape {x.shape} and `weight` has shape {shape}; they must be (rows, in) and (shards, "
            "groups, part, in)."
        )
    if group_sizes.shape != shape[1:2]:
        raise ValueError(
            f"`group_sizes` has shape {group_sizes.shape}, but there are {shape[1]} groups; it must have one "
            "number per group. Count with `jnp.bincount(group_of_row, length=groups)`."
        )
    if group_sizes.dtype != jnp.int32:
        raise TypeError(f"`group_sizes` is {group_sizes.dtype}; it must be int32.")
    if not isinstance(weight, QuantizedArray) and weight.dtype != x.dtype:
        raise TypeError(f"`x` is {x.dtype} and `weight` is {weight.dtype}; cast one to the dtype of the other.")


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _grouped_matmul(
    x: jax.Array, weight: jax.Array, slot: jax.Array, group_sizes: jax.Array, run: GroupedMatmul, dtype: np.dtype
) -> jax.Array:
    del slot, dtype
    return run.product(x, weight, group_sizes, dtype=x.dtype, transposed=True)


def _fwd(x: jax.Array, weight: jax.Array, slot: jax.Array, group_sizes: jax.Array, run: GroupedMatmul, dtype: np.dtype):
    del slot, dtype
    product = functools.partial(run.product, dtype=x.dtype, transposed=True)
    return as_one(product, x, weight, group_sizes), (x, weight, group_sizes)


def _bwd(run: GroupedMatmul, dtype: np.dtype, saved: tuple[jax.Array, jax.Array, jax.Array], gradient: jax.Array):
    x, weight, group_sizes = saved
    to_x = run.product(gradient, weight, group_sizes, dtype=x.dtype, transposed=False)
    to_weight = run.outer(gradient, x, group_sizes, dtype=dtype, shards=weight.shape[0])
    return to_x, None, to_weight, None


_grouped_matmul.defvjp(_fwd, _bwd)
