"""Wraps Flax's linear layers with LoRA adapters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..layout import Layout
from ..mesh import current_roles
from ._adapter import Adapter

STOCK = (nnx.Linear, nnx.LinearGeneral)


class AdaptedLinear(nnx.Module):
    """Computes the sum of `base(x)` and the adapter's term.

    Args:
        base: the layer: an `nnx.Linear`, or an `nnx.LinearGeneral` that contracts the last dimensions of its input.
        adapter: the adapter for the kernel of `base`, viewed as the matrix that `layout_of_stock(base)` describes.
    """

    wraps_stock = True  # so `gtp_jax.shard` does not take `base` for a layer that partitions its own weights

    def __init__(self, base: Any, adapter: Adapter) -> None:
        self.base = base
        self.adapter = adapter
        self.layout = layout_of_stock(base)
        self.ranks = current_roles().batch

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """Maps `(..., *features in)` to `(..., *features out)`. Further arguments are passed to `base`."""
        y = self.base(x, *args, **kwargs)
        lead = x.shape[: x.ndim - len(_tuple(self.base.in_features))]
        rows = jnp.reshape(x, (*lead, self.layout.shape[0])).astype(y.dtype)
        added = self.adapter.output(self.adapter.low(rows, self.layout, self.ranks, 0), self.layout)
        return y + jnp.reshape(added, y.shape)


def layout_of_stock(layer: Any) -> Layout:
    """Returns the layout of a Flax layer's kernel, viewed as a matrix `(features in, features out)` that no mesh axis
    divides."""
    shape = math.prod(_tuple(layer.in_features)), math.prod(_tuple(layer.out_features))
    return Layout(shape=shape, rows=1, roles=current_roles())


def check_stock(layer: Any, name: str) -> None:
    """Checks that a linear Flax layer supports an adapter: its kernel, viewed as a matrix, must multiply the last
    dimensions of the input.

    Raises:
        ValueError: if the layer's axes are not those of the last dimensions, given as negative numbers in ascending
            order; or if the layer has batch axes or a stacked kernel. The message names the layer and the reason.
    """
    features = len(_tuple(layer.in_features))
    ahead = layer.kernel.get_raw_value().ndim - features - len(_tuple(layer.out_features))
    if isinstance(layer, nnx.LinearGeneral) and (layer.batch_axis or _axes(layer) != tuple(range(-features, 0))):
        what = f"contracts the axes {layer.axis} and has the batch axes {dict(layer.batch_axis)}"
    elif ahead:
        what = f"has a kernel of shape {layer.kernel.get_raw_value().shape}, stacked by a scan or a `Stack`"
    else:
        return
    raise ValueError(
        f"{name} is an nnx.{type(layer).__name__} that {what}; adapters support only layers that contract the last "
        "dimensions of their input. Remove it from `targets`, or build its layers one by one or with "
        "`gtp_jax.Dense`."
    )


def places_of(model: nnx.Module) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Yields `(path, node, layer)` for each linear Flax layer in a model, where `node` is the module, list or dict that
    contains the layer. A layer that several nodes contain is yielded once for each of them."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.List):
            held = list(enumerate(node))
        elif isinstance(node, nnx.Dict):
            held = list(node.items())
        elif isinstance(node, nnx.Module):
            held = list(vars(node).items())
        else:
            continue
        for name, value in held:
            if isinstance(value, STOCK):
                yield (*path, name), node, value


def _axes(layer: nnx.LinearGeneral) -> tuple[int, ...]:
    return tuple(layer.axis)


def _tuple(sizes: Any) -> tuple[int, ...]:
    return tuple(sizes) if isinstance(sizes, tuple | list) else (sizes,)
