"""Optimizers see logical weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from ..mesh import Layout, of_parameter, with_paths
from ..nn import Skeleton


def on_logical(optimizer: optax.GradientTransformation, skeleton: Skeleton) -> optax.GradientTransformationExtraArgs:
    """An optimizer that works on weights without padding and keeps its state padded.

    Statistics over a whole weight (Adafactor's factors, Muon's orthogonalisation, a norm) are then those of the
    unsharded model, while every array stays evenly cut. Without padded weights this is the optimizer itself.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    layouts = {path: layout for path, layout in with_paths(skeleton.layouts) if layout is not None}
    if not layouts:
        return optimizer

    def init(params: Any) -> Any:
        return _padded(optimizer.init(skeleton.logical(params)), layouts)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        bare = _unpadded(state, layouts)
        whole = None if params is None else skeleton.logical(params)
        updates, bare = optimizer.update(skeleton.logical(updates), bare, whole, **extra)
        return skeleton.physical(updates), _padded(bare, layouts)

    return optax.GradientTransformationExtraArgs(init, update)


def _padded(state: Any, layouts: dict[Any, Layout]) -> Any:
    return _where_mirrored(state, layouts, lambda layout: layout.shape, Layout.physical)


def _unpadded(state: Any, layouts: dict[Any, Layout]) -> Any:
    return _where_mirrored(state, layouts, lambda layout: layout.physical_shape, Layout.logical)


def _where_mirrored(
    state: Any,
    layouts: dict[Any, Layout],
    shape_of: Callable[[Layout], tuple[int, ...]],
    change: Callable[[Layout, jax.Array], jax.Array],
) -> Any:
    """Changes the arrays that mirror a padded weight: its path, and its shape behind any leading dimensions."""

    def visit(path: Any, leaf: jax.Array) -> jax.Array:
        layout = of_parameter(path, layouts)
        if layout is None:
            return leaf
        wanted = shape_of(layout)
        return change(layout, leaf) if leaf.shape[leaf.ndim - len(wanted) :] == wanted else leaf

    changed = [visit(path, leaf) for path, leaf in with_paths(state)]
    return jax.tree.unflatten(jax.tree.structure(state), changed)
