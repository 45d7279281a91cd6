"""Models that are created sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from ..mesh import check_mesh_in_scope
from ._layer import partition_of
from ._weight import name_weights


def init[M: nnx.Module](factory: Callable[[nnx.Rngs], M], rngs: nnx.Rngs) -> M:
    """Builds a model under the mesh in scope, every array sharded from the start.

    The program that makes the values is compiled with the shardings on its outputs, so no device ever holds a whole
    model; and the values are those of the logical arrays, so that models on different meshes start equal.

    Args:
        factory: makes the model, e.g. the class itself; called once to find shapes and once under `jit`.
        rngs: as for any NNX module.

    Returns:
        The model, its arrays sharded. Its weights know their paths, which recipes match; see `gtp_jax.use_recipe`.
        Without a mesh it is whole, on one device, with a warning if there are several.

    Raises:
        ValueError: if the mesh in scope has Explicit axes, or was put there by `with mesh:`.
    """
    check_mesh_in_scope(creates=True)
    graph, make, keys = _birth(factory, rngs)
    model = nnx.merge(graph, make(keys))
    name_weights(model)
    return model


def _birth(factory: Callable[[nnx.Rngs], Any], rngs: nnx.Rngs) -> tuple[Any, Any, Any]:
    """Returns a model's graph, the jitted program that makes its arrays, and that program's argument."""
    streams, keys = nnx.split(rngs)
    # of copies of the streams themselves, as a model's variables may name them
    abstract = abstract_model(lambda _: factory(nnx.merge(streams, jax.tree.map(lambda a: a, keys))))
    graph, state = nnx.split(abstract)
    mesh = jax.sharding.get_mesh()
    shardings = None
    if not mesh.empty:
        shardings = jax.tree.map(
            lambda v: v.replace(NamedSharding(mesh, partition_of(v))),
            state,
            is_leaf=lambda v: isinstance(v, nnx.Variable),
        )
    make = jax.jit(lambda keys: nnx.split(factory(nnx.merge(streams, keys)))[1], out_shardings=shardings)
    return graph, make, keys


def abstract_model[M: nnx.Module](factory: Callable[[nnx.Rngs], M]) -> M:
    """Returns the model with `jax.ShapeDtypeStruct`s, sharded for the mesh in scope, in place of arrays.

    Allocates nothing, so the mesh may consist of devices that are not there.

    Raises:
        ValueError: if the mesh in scope has Explicit axes, or was put there by `with mesh:`.
    """
    check_mesh_in_scope()
    model = nnx.eval_shape(lambda: factory(nnx.Rngs(0)))
    mesh = jax.sharding.get_mesh()
    graph, state = nnx.split(model)

    def place(variable: Any) -> Any:
        value = variable.get_value()
        sharding = None if mesh.empty else NamedSharding(mesh, partition_of(variable))
        return variable.replace(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))

    return nnx.merge(graph, jax.tree.map(place, state, is_leaf=lambda v: isinstance(v, nnx.Variable)))
