"""Converts arrays between their logical shape and the padded one in which they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._array import ArrayLayout
from ._layout import Layout
from ._placement import Placement

AnyLayout = Layout | ArrayLayout | Placement


def is_padded(layout: AnyLayout) -> bool:
    """Returns whether the stored array is larger than the logical one."""
    return layout.array_shape != layout.shape


def padded_shape(shape: Sequence[int], layout: AnyLayout) -> tuple[int, ...]:
    """Returns the shape of the stored array, given that of either array, with or without leading dimensions of a
    stack."""
    return (*shape[: len(shape) - len(layout.shape)], *layout.array_shape)


def cut_shape(shape: Sequence[int], layout: AnyLayout) -> tuple[int, ...]:
    """Returns the shape of the logical array, given that of either array, with or without leading dimensions of a
    stack."""
    return (*shape[: len(shape) - len(layout.shape)], *layout.shape)


def pad(array: Any, layout: AnyLayout) -> Any:
    """Returns an array as it is stored, given the logical one, with or without leading dimensions of a stack. An array
    on the host stays there. If an abstract array is padded, the result has no sharding."""
    if not is_padded(layout):
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(padded_shape(array.shape, layout), array.dtype)
    more = [stored - size for stored, size in zip(layout.array_shape, layout.shape, strict=True)]
    ahead = [(0, 0)] * (array.ndim - len(more))
    pad = np.pad if isinstance(array, np.ndarray) else jnp.pad
    return pad(array, [*ahead, *((0, size) for size in more)])


def cut(array: Any, layout: AnyLayout) -> Any:
    """Returns the logical array, given the stored one, with or without leading dimensions of a stack. For an abstract
    array, the result has no sharding, because JAX has no uneven ones."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(cut_shape(array.shape, layout), array.dtype)
    if not is_padded(layout):
        return array
    if isinstance(array, jax.Array):  # NumPy's indices would be a gather of several programs outside of `jit`
        logical = cut_shape(array.shape, layout)
        # the part of a tensor rank may be smaller
        return lax.slice(array, [0] * array.ndim, [*map(min, array.shape, logical)])
    return array[(..., *(slice(size) for size in layout.shape))]
