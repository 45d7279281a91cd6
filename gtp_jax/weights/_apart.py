"""A stack of layers' arrays that lie apart."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.tree_util.register_dataclass, data_fields=("layers",), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Apart:
    """Stands in the place of a stacked array: each layer's part is an array of its own, and is taken without a copy.

    Attributes:
        layers: one array for each layer, `(1, *shape)`: a stack of one.
    """

    layers: tuple[jax.Array, ...]

    def joined(self) -> jax.Array:
        """Returns the stacked array, a copy: for a loop, which does not know in advance what layer it takes."""
        return jnp.concatenate(self.layers)

    def only(self, index: int) -> Apart:
        """Returns one layer alone."""
        return Apart((self.layers[index],))

    def layer(self, index: int) -> jax.Array:
        """Returns one layer's array, `(*shape)`; if there is only one layer, that one."""
        own = self.layers[0] if len(self.layers) == 1 else self.layers[index]
        return own[0]

    def __getitem__(self, layers: slice) -> Apart:
        """Returns some layers."""
        return Apart(self.layers[layers])
