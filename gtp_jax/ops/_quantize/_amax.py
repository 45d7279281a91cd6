"""The amax (largest finite magnitude) of arrays, and the Hadamard transform."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import BFloat16, Float, Float32

from ...formats import Format
from .._implementation import Implementation
from ..reference import hadamard as _transform
from ._call import call
from ._checks import as_matrix, as_values


def multi_amax(
    arrays: Sequence[Float[jax.Array, " ..."]], *, stacked: bool = False, implementation: Implementation | None = None
) -> Float32[jax.Array, " amaxes"]:
    """Returns the largest finite magnitude of each of several arrays; on GPUs, one launch handles many arrays.

    NaN and Inf are ignored, so that they spoil only their own block, not the scale of the whole tensor.

    Args:
        arrays: a list of any number of arrays in float32, bfloat16 or float16, of any shapes. The amax of an empty
            array is 0.
        stacked: whether every array is a stack along its first dimension, with one amax per index.
        implementation: `"reference"`, `"native"`, or `None` for the best available.

    Returns:
        float32 `(len(arrays),)`; if `stacked`, the amaxes of all stacks, concatenated.

    Raises:
        TypeError: if `arrays` is a single array, or one of the arrays has another dtype.
        ValueError: if `stacked`, and one of the arrays is a scalar.
        NotImplementedError: if `implementation` is `"native"`, and there is no kernel for the current platform.
    """
    if hasattr(arrays, "dtype"):
        raise TypeError("`arrays` is one array; it must be a list of arrays. Write `multi_amax([x])[0]`.")
    values = [as_values(f"arrays[{i}]", x) for i, x in enumerate(arrays)]
    for index, x in enumerate(values):
        if stacked and x.ndim == 0:
            raise ValueError(f"`arrays[{index}]` is a scalar; with `stacked` it must have at least one dimension.")
    return call("multi_amax", implementation, values, stacked=stacked)


def hadamard_amax(
    x: Float[jax.Array, "... columns"], *, implementation: Implementation | None = None
) -> Float32[jax.Array, ""]:
    """Returns the largest finite magnitude of `hadamard(x)`, a float32 scalar, without storing the transformed array.

    Args:
        x: `(*lead, M, K)` or `(K,)`, float32, bfloat16 or float16.
        implementation: as in `multi_amax`.

    Raises:
        TypeError: if `x` has another dtype.
        ValueError: if `x` is a scalar.
        NotImplementedError: as in `multi_amax`.
    """
    return call("hadamard_amax", implementation, as_matrix("x", x))


@jax.jit
def _forward(x: jax.Array) -> jax.Array:
    return _transform(x)


@jax.jit
def _inverse(x: jax.Array) -> jax.Array:
    return _transform(x, inverse=True)


def hadamard(x: Float[jax.Array, "... columns"], *, inverse: bool = False) -> BFloat16[jax.Array, "*lead rows columns"]:
    """Returns the 16 x 16 random Hadamard transform along the rows, an option of the column-wise copy of `NVFP4_1D`.

    Every run of 16 rows becomes `H (d * x)`, where H is orthogonal with entries +-1/4, and d are fixed signs. If both
    operands of a matmul are transformed along the rows that it contracts, the product does not change.

    Args:
        x: `(*lead, M, K)` or `(K,)`, float32, bfloat16 or float16; M is padded with zeros to a multiple of 16.
        inverse: whether to return the inverse transform, `d * (H x)`.

    Returns:
        bfloat16 `(*lead, M rounded up to 16, K)`, computed in float32 and rounded once.

    Raises:
        TypeError: if `x` has another dtype.
        ValueError: if `x` is a scalar.
    """
    return (_inverse if inverse else _forward)(as_matrix("x", x))


def power_of_two_amax(amax: Float32[jax.Array, "*shape"], format: Format) -> Float32[jax.Array, "*shape"]:
    """Returns the amax, increased until the tensor's scale is a power of two. An amax that is 0 or not finite, or whose
    scale is close to the limits of float32, is returned unchanged."""
    least = amax / format.largest
    mantissa, exponent = jnp.frexp(least)
    unit = jnp.ldexp(jnp.float32(1), jnp.where(mantissa == 0.5, exponent - 1, exponent))
    rounded = unit * format.largest
    usable = jnp.isfinite(amax) & jnp.isfinite(rounded) & (least >= jnp.finfo(jnp.float32).tiny)
    return jnp.where(usable, rounded, amax)
