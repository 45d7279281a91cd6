"""Inputs of a call behind the activation: a layer's own, or those that all layers of a stack share."""

from __future__ import annotations

import copy
from typing import Any

import jax
import numpy as np
from flax import nnx


class SharedInputs:
    """The arguments of a layer's or a `Stack`'s call behind the activation, split into arrays and the rest.

    Attributes:
        arrays: the arrays among them, which a chain carries and a `shard_map` shards. Others, such as `True`,
            `"causal"` or `None`, are part of the program.
        names: of the argument that each array is in, or its number if it is passed by position.

    Raises:
        TypeError: if there is an NNX object among them.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        paths, self._tree = jax.tree.flatten_with_path((args, kwargs), is_leaf=_is_nnx)
        leaves = [leaf for _, leaf in paths]
        for leaf in leaves:
            if _is_nnx(leaf):
                raise TypeError(
                    f"a further input of a layer or a `Stack` is a {type(leaf).__name__}; it must be an array, or a "
                    "plain value such as `True`, because a layer's changes to it would be lost. Give modules and "
                    "`nnx.Rngs` to layers when they are made (`Block(rngs=rngs)`, `Stack(lambda rngs: "
                    "Block(rngs=rngs), ...)`), and pass a variable's value."
                )
        self._is_array = [isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves]
        self._others = [None if array else leaf for leaf, array in zip(leaves, self._is_array, strict=True)]
        arguments = [path[1] for path, leaf in paths if isinstance(leaf, jax.Array | np.ndarray | np.generic)]
        self.names = [path.key if isinstance(path, jax.tree_util.DictKey) else path.idx for path in arguments]
        self.arrays = [leaf for leaf, array in zip(leaves, self._is_array, strict=True) if array]

    @property
    def empty(self) -> bool:
        """Says whether there are none."""
        return not self._is_array

    def without_arrays(self) -> SharedInputs:
        """Returns the rest alone, for a rule of a derivative, which outlives the trace of the arrays."""
        rest = copy.copy(self)
        rest.arrays = []
        return rest

    def arguments(self, arrays: list[jax.Array]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments, with these arrays in place of `arrays`."""
        values = iter(arrays)
        leaves = [next(values) if array else v for v, array in zip(self._others, self._is_array, strict=True)]
        return jax.tree.unflatten(self._tree, leaves)


def _is_nnx(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable | nnx.Pytree)
