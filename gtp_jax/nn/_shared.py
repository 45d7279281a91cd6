"""Splits the arguments that follow the activation in a call into arrays and other values."""

from __future__ import annotations

import copy
from typing import Any

import jax
import numpy as np
from flax import nnx

from ..chain import joined, separated

_NO_ARGUMENTS = jax.tree.structure(((), {})).num_nodes


class SharedInputs:
    """The arguments that follow the activation in a call of a layer or a `Stack`, split into arrays and other values.

    Attributes:
        arrays: the arguments, or parts of arguments, that are arrays. A chain carries them, and a `shard_map` shards
            them. Other values, such as `True`, `"causal"` or `None`, are constants of the program.
        names: for each array, the name of the argument that contains it, or the argument's index if it was passed by
            position.

    Raises:
        TypeError: if an NNX object is among them.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        paths, self._tree = jax.tree.flatten_with_path((args, kwargs), is_leaf=_is_nnx)
        leaves = [leaf for _, leaf in paths]
        for leaf in leaves:
            if _is_nnx(leaf):
                raise TypeError(
                    f"an additional input of a layer or a `Stack` is a {type(leaf).__name__}; it must be an array, "
                    "or a plain value such as `True`, because changes that a layer makes to it would be lost. Pass "
                    "modules and `nnx.Rngs` when layers are constructed (`Block(rngs=rngs)`, `Stack(lambda rngs: "
                    "Block(rngs=rngs), ...)`), and pass the value of a variable instead of the variable."
                )
        self._is_array = [isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves]
        arguments = [path[1] for path, leaf in paths if isinstance(leaf, jax.Array | np.ndarray | np.generic)]
        self.names = [path.key if isinstance(path, jax.tree_util.DictKey) else path.idx for path in arguments]
        self.arrays, self._others = separated(leaves, self._is_array)

    @property
    def empty(self) -> bool:
        """Whether the call has no arguments after the activation."""
        return self._tree.num_nodes == _NO_ARGUMENTS

    def without_arrays(self) -> SharedInputs:
        """Returns a copy without the arrays, for functions that JAX keeps after the trace of the arrays has ended."""
        rest = copy.copy(self)
        rest.arrays = []
        return rest

    def arguments(self, arrays: list[jax.Array]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the positional and the keyword arguments, with the given arrays instead of `arrays`."""
        return jax.tree.unflatten(self._tree, joined(arrays, self._others, self._is_array))


def _is_nnx(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable | nnx.Pytree)
