"""What an optimizer keeps for a padded weight: its mirrors are padded like it, and nothing else is taken for one."""

from __future__ import annotations

import jax

from ._layout import Layout


def in_memory(layout: Layout, companion: jax.Array) -> jax.Array:
    """A logical array that belongs to a weight, as it is kept beside it.

    One that ends with the weight's logical shape mirrors it, and is padded. One that is no mirror but ends with the
    physical shape (the 128 x 128 preconditioner of a 128 x 120 weight that is padded to 128 x 128) gets a trailing
    dimension of 1, so that shapes alone tell which is which, and `on_disk` is the exact inverse.
    """
    if _ends_with(companion.shape, layout.shape):
        return layout.physical(companion)
    return companion[..., None] if _ones_behind(layout, companion.shape) is not None else companion


def on_disk(layout: Layout, companion: jax.Array) -> jax.Array:
    """The inverse of `in_memory`: what the optimizer sees, and checkpoints hold."""
    ones = _ones_behind(layout, companion.shape)
    if ones is None:
        return companion
    return companion[..., 0] if ones else layout.logical(companion)


def differs_in_memory(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether `on_disk` changes an array of this shape."""
    return layout.padded and _ones_behind(layout, shape) is not None


def _ones_behind(layout: Layout, shape: tuple[int, ...]) -> int | None:
    """How many dimensions of 1 follow the weight's physical shape at the end of a shape; `None` if it is not there."""
    for ones in range(len(shape) - len(layout.shape) + 1):
        if _ends_with(shape, (*layout.physical_shape, *(1,) * ones)):
            return ones
    return None


def _ends_with(shape: tuple[int, ...], end: tuple[int, ...]) -> bool:
    return shape[max(0, len(shape) - len(end)) :] == end
