"""Optimizers see logical weights."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..mesh import Layout
from ..nn import Skeleton


def on_logical(optimizer: optax.GradientTransformation, skeleton: Skeleton) -> optax.GradientTransformationExtraArgs:
    """An optimizer that works on weights without padding and keeps its state padded.

    Statistics over a whole weight (Adafactor's factors, Muon's orthogonalisation, a norm) are then those of the
    unsharded model, while every array stays evenly cut. Without padded weights this is the optimizer itself.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    is_layout = lambda x: x is None or isinstance(x, Layout)  # noqa: E731
    if all(layout is None for layout in jax.tree.leaves(skeleton.layouts, is_leaf=is_layout)):
        return optimizer

    def init(params: Any) -> Any:
        return _padded(optimizer, optimizer.init(skeleton.logical(params)), skeleton)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        bare = _unpadded(optimizer, state, skeleton)
        whole = None if params is None else skeleton.logical(params)
        updates, bare = optimizer.update(skeleton.logical(updates), bare, whole, **extra)
        return skeleton.physical(updates), _padded(optimizer, bare, skeleton)

    return optax.GradientTransformationExtraArgs(init, update)


def _padded(optimizer: Any, state: Any, skeleton: Skeleton) -> Any:
    def change(leaf: jax.Array, layout: Any) -> jax.Array:
        return layout.value.physical(leaf) if layout.matches(leaf.shape, logical=True) else leaf

    return optax.tree_map_params(optimizer, change, state, _boxes(skeleton))


def _unpadded(optimizer: Any, state: Any, skeleton: Skeleton) -> Any:
    def change(leaf: jax.Array, layout: Any) -> jax.Array:
        return layout.value.logical(leaf) if layout.matches(leaf.shape, logical=False) else leaf

    return optax.tree_map_params(optimizer, change, state, _boxes(skeleton))


class _Box:
    """A layout as a leaf, `None` included; `None` itself would be no leaf of a pytree."""

    def __init__(self, value: Layout | None):
        self.value = value

    def matches(self, shape: tuple[int, ...], *, logical: bool) -> bool:
        """Whether an optimizer's array mirrors the weight (a stack's leading dimension aside)."""
        if self.value is None:
            return False
        wanted = self.value.shape if logical else self.value.physical_shape
        return shape[len(shape) - len(wanted) :] == wanted


def _boxes(skeleton: Skeleton) -> Any:
    return jax.tree.map(_Box, skeleton.layouts, is_leaf=lambda x: x is None or isinstance(x, Layout))
