"""Converts arrays between their logical shape and the padded one in which they are stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._array import ArrayLayout
from ._layout import Layout
from ._placement import Placement

AnyLayout = Layout | ArrayLayout | Placement


def pad(array: Any, layout: AnyLayout) -> Any:
    """Returns an array as it is stored, given the logical one, with or without leading dimensions of a stack. An array
    on the host stays there."""
    more = [stored - size for stored, size in zip(layout.array_shape, layout.shape, strict=True)]
    ahead = [(0, 0)] * (array.ndim - len(more))
    pad = np.pad if isinstance(array, np.ndarray) else jnp.pad
    return pad(array, [*ahead, *((0, size) for size in more)]) if any(more) else array


def cut(array: jax.Array, layout: AnyLayout) -> jax.Array:
    """Returns the logical array, given the stored one, with or without leading dimensions of a stack."""
    if layout.array_shape == layout.shape:
        return array
    return array[(..., *(slice(size) for size in layout.shape))]
