"""Keys of stochastic rounding: of a model, of its modules, and of each call of one."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import UInt32


def key_for(key: UInt32[jax.Array, " 2"], path: tuple[Any, ...]) -> UInt32[jax.Array, " 2"]:
    """Returns the key of a module: that of the whole model, told apart by the module's path."""
    return key ^ jnp.array([0, zlib.crc32(".".join(map(str, path)).encode())], jnp.uint32)


# No call has this number, so that no key of a link is that of a call.
_LINK = 2**31


@jax.tree_util.register_pytree_node_class
class CallKeys:
    """A module's key, another one at each call: two calls in one layer must not round alike.

    Calls are counted while a program is traced, from 0 in every trace; the number is no part of the pytree. So what is
    traced once and run often has one key: every iteration of a loop over a module, all of a `vmap`, and calls through
    a transformation that takes a module apart and puts it together again, such as `nnx.remat`. A `Stack`'s layers have
    keys of their own.

    Args:
        words: uint32 `(2,)`, the key of the first call.
    """

    def __init__(self, words: Any) -> None:
        self._words = words
        self._calls = 0

    def next(self, *, link: bool = False) -> UInt32[jax.Array, " 2"]:
        """Returns uint32 `(2,)` for the call made now; or for a chain's `link`, whose own calls are counted in turn."""
        number, self._calls = self._calls, self._calls + 1
        words = _folded(self._words, number) if number else self._words
        return _folded(words, _LINK) if link else words

    def for_view(self) -> CallKeys:
        """Returns keys for the call made now, whose module is taken apart and put together inside a `shard_map`: there
        calls are counted in turn. The first call's are as if it were not."""
        number, self._calls = self._calls, self._calls + 1
        return CallKeys(self._words if not number else _folded(_folded(self._words, number), _LINK))

    def of_rank(self, rank: jax.Array) -> CallKeys:
        """Returns keys that differ from rank to rank, as every rank has other tokens to round."""
        return CallKeys(_folded(self._words, rank))

    def tree_flatten(self) -> tuple[tuple[jax.Array], None]:
        return (self._words,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[jax.Array]) -> CallKeys:
        return cls(*children)


def _folded(words: jax.Array, number: int | jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(key, number))
