"""Makes any NNX model on the mesh in scope, sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ..._foreign import brief
from ...hook import has_weights_to_shard, shard
from ...nn import abstract_model, init


class AnyModel:
    """A model that is sharded as it is made. `gtp_jax.shard` shards it, unless it consists of gtp_jax's own layers, is
    sharded already or has no weight that is large enough.

    Args:
        model: a module, which is sharded in place, or a function that makes one from `nnx.Rngs`.
        seed: the seed of the function's `nnx.Rngs`.

    Raises:
        TypeError: if `model` is neither.
    """

    def __init__(self, model: nnx.Module | Callable[[nnx.Rngs], nnx.Module], seed: int) -> None:
        if not isinstance(model, nnx.Module) and not callable(model):
            raise TypeError(
                f"`model` is {brief(model)}; it must be an `nnx.Module`, or a function of `nnx.Rngs` that returns one."
            )
        self._model, self._seed = model, seed
        self._is_sharded = False

    @property
    def name(self) -> str:
        """The name of the module's class, or of the function."""
        of = type(self._model) if isinstance(self._model, nnx.Module) else self._model
        return getattr(of, "__name__", type(of).__name__)

    def abstract(self) -> nnx.Module:
        """Returns the model with shapes and shardings instead of arrays. The mesh must be in scope."""
        if not isinstance(self._model, nnx.Module):
            return abstract_model(self._made)
        graph, state = nnx.split(self.fresh())
        return nnx.merge(graph, jax.tree.map(_abstract, state))

    def fresh(self) -> nnx.Module:
        """Returns the model with its initial values. The mesh must be in scope."""
        if not isinstance(self._model, nnx.Module):
            return init(self._made, nnx.Rngs(self._seed))
        if not self._is_sharded:
            _sharded(self._model)
            nnx.update(self._model, jax.tree.map(_on_mesh, nnx.state(self._model)))
            self._is_sharded = True
        return self._model

    def _made(self, rngs: nnx.Rngs) -> nnx.Module:
        assert not isinstance(self._model, nnx.Module)
        made = self._model(rngs)
        if not isinstance(made, nnx.Module):
            raise TypeError(f"`model` is a function that returned {brief(made)}; it must return an `nnx.Module`.")
        return _sharded(made)


def _sharded(model: nnx.Module) -> nnx.Module:
    if not has_weights_to_shard(model):
        return model
    try:
        return shard(model)
    except ValueError as error:
        raise ValueError(
            f"{error} To choose how the model is sharded, call `gtp_jax.shard` yourself: pass a function such as "
            "`lambda rngs: gtp_jax.shard(Model(rngs), blocks=...)` as `model`."
        ) from error


def _abstract(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _on_mesh(array: Any) -> Any:
    """Returns an array that is on the mesh in scope, whole on each device unless it is there already."""
    mesh = jax.sharding.get_mesh()
    if isinstance(array, jax.Array) and getattr(array.sharding, "mesh", None) == mesh:
        return array
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec()))
