"""Optimizers see logical weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from ..mesh import Layout, in_memory, of_parameter, on_disk, with_paths
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
        return _each(optimizer.init(skeleton.logical(params)), layouts, in_memory)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        bare = _each(state, layouts, on_disk)
        whole = None if params is None else skeleton.logical(params)
        updates, bare = optimizer.update(skeleton.logical(updates), bare, whole, **extra)
        return skeleton.physical(updates), _each(bare, layouts, in_memory)

    return optax.GradientTransformationExtraArgs(init, update)


def _each(state: Any, layouts: dict[Any, Layout], change: Callable[[Layout, jax.Array], jax.Array]) -> Any:
    """Changes the arrays that belong to a padded weight."""

    def visit(path: Any, leaf: jax.Array) -> jax.Array:
        layout = of_parameter(path, layouts)
        return leaf if layout is None or not layout.padded else change(layout, leaf)

    changed = [visit(path, leaf) for path, leaf in with_paths(state)]
    return jax.tree.unflatten(jax.tree.structure(state), changed)
