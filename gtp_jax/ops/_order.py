"""The order of features that several kernels share, if tiles begin at each kernel's first row."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..formats import QuantizedArray
from ._quantize import RUN


class Order(NamedTuple):
    """The order of the rows of codes that several kernels share.

    Rows of codes lie kernel by kernel, and tiles begin at each kernel's first row. Features and gradients lie in the
    order of `ranks` parts, each with an equal share of every kernel.

    Attributes:
        rows: the number of rows of each kernel.
        ranks: the number of parts.
    """

    rows: tuple[int, ...]
    ranks: int = 1

    @property
    def padded(self) -> tuple[int, ...]:
        """The number of rows of each kernel, where all but the last are padded to whole tiles."""
        return (*(-(-rows // RUN) * RUN for rows in self.rows[:-1]), self.rows[-1])

    @property
    def cuts(self) -> bool:
        """Whether a kernel but the last is no whole number of tiles."""
        return self.padded != self.rows

    @property
    def plain(self) -> bool:
        """Whether features lie in the order of the rows of codes, without padding."""
        return self.ranks == 1 and not self.cuts


def padded_shape(shape: tuple[int, ...], order: Order | None) -> tuple[int, ...]:
    """Returns the shape that `in_whole_tiles` gives codes of this shape."""
    return shape if order is None else (*shape[:-2], sum(order.padded), shape[-1])


def in_whole_tiles(weight: QuantizedArray, order: Order | None) -> QuantizedArray:
    """Returns codes `(*lead, rows of kernels, features)` with each kernel but the last padded with zeros to whole
    tiles."""
    if order is None or not order.cuts:
        return weight
    kernels = jnp.split(weight.codes, np.cumsum(order.rows[:-1]), axis=-2)
    lead = ((0, 0),) * (weight.codes.ndim - 2)
    padded = [
        jnp.pad(one, (*lead, (0, more - rows), (0, 0)))
        for one, rows, more in zip(kernels, order.rows, order.padded, strict=True)
    ]
    codes = jnp.concatenate(padded, axis=-2)
    return QuantizedArray(codes, weight.scales, None, weight.format, (codes.shape[-2], codes.shape[-1]))


def by_parts(y: jax.Array, order: Order | None) -> jax.Array:
    """Returns features `(tokens, padded rows of kernels)` without padding and in the order of parts."""
    if order is None or order.plain:
        return y
    kernels = jnp.split(y, np.cumsum(order.padded[:-1]), axis=1)
    own = [kernel[:, :rows] for kernel, rows in zip(kernels, order.rows, strict=True)]
    parts = [jnp.reshape(one, (len(y), order.ranks, one.shape[1] // order.ranks)) for one in own]
    return jnp.reshape(jnp.concatenate(parts, axis=2), (len(y), sum(order.rows)))


def by_kernels(y: jax.Array, order: Order | None) -> jax.Array:
    """Returns features in the order of kernels, each but the last padded with zeros: the transpose of `by_parts`."""
    if order is None or order.plain:
        return y
    parts = jnp.reshape(y, (len(y), order.ranks, y.shape[1] // order.ranks))
    kernels = jnp.split(parts, np.cumsum([rows // order.ranks for rows in order.rows[:-1]]), axis=2)
    joined = [jnp.reshape(one, (len(y), rows)) for one, rows in zip(kernels, order.rows, strict=True)]
    padded = [jnp.pad(one, ((0, 0), (0, -one.shape[1] % RUN))) for one in joined[:-1]]
    return jnp.concatenate([*padded, joined[-1]], axis=1)
