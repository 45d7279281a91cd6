"""Linear layers of Flax, wrapped with an adapter."""

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
        base: the layer: an `nnx.Linear`, or an `nnx.LinearGeneral` over the last dimensions of its input.
        adapter: the adapter of its kernel, viewed as a matrix with `layout_of_stock(base)`.
    """

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
    """Returns the layout of a layer's kernel, viewed as a matrix that tp does not divide."""
    shape = math.prod(_tuple(layer.in_features)), math.prod(_tuple(layer.out_features))
    return Layout(shape=shape, rows=1, roles=current_roles())


def check_stock(layer: Any, name: str) -> None:
    """Checks that the adapter of a layer would be a product of two matrices.

    Raises:
        ValueError: if it would not, because the layer contracts other dimensions than the last, has batch axes, or has
            a stacked kernel. The message names the layer and the reason.
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
    """Yields the path of each linear Flax layer in a model, the node that contains it, and the layer. A layer that
    several nodes contain is yielded once for each."""
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
