"""Keys of stochastic rounding: of a model, of its modules, and of each call of one."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp


def key_for(key: jax.Array, path: tuple[Any, ...]) -> jax.Array:
    """The key of a module: that of the whole model, told apart by the module's path."""
    return key ^ jnp.array([0, zlib.crc32(".".join(map(str, path)).encode())], jnp.uint32)


@jax.tree_util.register_pytree_node_class
class CallKeys:
    """A module's key, another one at each call: two calls in one layer must not round alike.

    Calls are counted while a program is traced, from 0 in every trace; the number is no part of the pytree.

    Args:
        words: uint32 `(2,)`, the key of the first call.
    """

    def __init__(self, words: jax.Array) -> None:
        self._words = words
        self._calls = 0

    def next(self) -> jax.Array:
        """uint32 `(2,)`, of the call that is made now."""
        number, self._calls = self._calls, self._calls + 1
        if number == 0:
            return self._words
        return jax.random.key_data(
            jax.random.fold_in(jax.random.wrap_key_data(self._words, impl="threefry2x32"), number)
        )

    def tree_flatten(self) -> tuple[tuple[jax.Array], None]:
        return (self._words,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[jax.Array]) -> CallKeys:
        return cls(*children)
