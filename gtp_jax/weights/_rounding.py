"""Derives keys of stochastic rounding for a model's modules, and for each call of a module."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt32


def key_for(key: UInt32[jax.Array, " 2"], path: tuple[Any, ...]) -> UInt32[jax.Array, " 2"]:
    """Returns the key of a module, derived from the key of the model and the module's path, or from the key of a module
    above it and the rest of the path. Keys that are derived in another order differ."""
    return _folded(key, np.uint32(zlib.crc32(".".join(map(str, path)).encode())))


# No call has this number, so that the key of a link is never that of a call.
_LINK = 2**31


@jax.tree_util.register_pytree_node_class
class CallKeys:
    """The keys of a module, a different one for each call, because two calls in a layer must not use the same random
    bits.

    Calls are counted while a program is traced, from 0 in every trace; the count is not part of the pytree. Calls that
    are traced once and run often therefore share a key: all iterations of a loop over a module, all indices of a
    `vmap`, and calls through a transformation that splits and merges a module, such as `nnx.remat`. The layers of a
    `Stack` have keys of their own.

    Args:
        words: the key of the first call, uint32 `(2,)`.
    """

    def __init__(self, words: Any) -> None:
        self._words = words
        self._calls = 0

    def next(self, *, link: bool = False) -> UInt32[jax.Array, " 2"]:
        """Returns the key of the current call, uint32 `(2,)`; with `link`, the first key of a link of a chain, which
        counts its own calls."""
        number, self._calls = self._calls, self._calls + 1
        words = _folded(self._words, number) if number else self._words
        return _folded(words, _LINK) if link else words

    def for_view(self) -> CallKeys:
        """Returns the keys for the current call of a module that is split, and merged again inside a `shard_map`. Calls
        are counted from 0 there, so the number of this call is folded into the keys; those of the first call are
        unchanged."""
        number, self._calls = self._calls, self._calls + 1
        return CallKeys(self._words if not number else _folded(_folded(self._words, number), _LINK))

    def of_rank(self, rank: jax.Array) -> CallKeys:
        """Returns keys that differ from rank to rank, because each rank rounds the gradients of different tokens."""
        return CallKeys(_folded(self._words, rank))

    def tree_flatten(self) -> tuple[tuple[jax.Array], None]:
        return (self._words,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[jax.Array]) -> CallKeys:
        return cls(*children)


def _folded(words: jax.Array, number: int | np.uint32 | jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(key, number))
