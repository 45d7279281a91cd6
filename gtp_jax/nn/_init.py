"""Models that are created sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..mesh import check_mesh_in_scope, mesh_of_devices
from ._layer import partition_of, value_of, with_value
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
        ValueError: if the mesh in scope has Explicit axes, or was put there by `with mesh:`; while JAX traces.
    """
    check_mesh_in_scope(creates=True)
    graph, make, keys = _birth(factory, rngs)
    model = nnx.merge(graph, make(keys))
    name_weights(model)
    return model


def _birth(factory: Callable[[nnx.Rngs], Any], rngs: nnx.Rngs) -> tuple[Any, Any, Any]:
    """Returns a model's graph, the jitted program that makes its arrays, and that program's argument."""
    mesh = mesh_of_devices("gtp_jax.init")
    streams, keys = nnx.split(rngs)
    # of copies of the streams themselves, as a model's variables may name them
    abstract = _abstract(lambda _: factory(nnx.merge(streams, jax.tree.map(lambda a: a, keys))))
    graph, state = nnx.split(abstract)
    shardings = None
    if not mesh.empty:
        shardings = jax.tree.map(
            lambda v: with_value(v, _shardings(mesh, v)),
            state,
            is_leaf=lambda v: isinstance(v, nnx.Variable),
        )
    make = jax.jit(lambda keys: nnx.split(factory(nnx.merge(streams, keys)))[1], out_shardings=shardings)
    return graph, make, keys


def abstract_model[M: nnx.Module](factory: Callable[[nnx.Rngs], M]) -> M:
    """Returns the model with `jax.ShapeDtypeStruct`s, sharded for the mesh in scope, in place of arrays.

    Allocates nothing, so the mesh may consist of devices that are not there. Its weights know their paths, as those of
    `init` do. The factory is called with `nnx.Rngs(0)`.
    A model that keeps its `nnx.Rngs`, by the names of their streams, makes its own:
    `abstract_model(lambda _: Model(nnx.Rngs(0, dropout=1)))`.

    Raises:
        ValueError: if the mesh in scope has Explicit axes, or was put there by `with mesh:`; while JAX traces.
    """
    model = _abstract(factory)
    name_weights(model)
    return model


def _abstract[M: nnx.Module](factory: Callable[[nnx.Rngs], M]) -> M:
    """Returns an abstract model, as a factory makes it: its weights do not know their paths."""
    check_mesh_in_scope()
    mesh = mesh_of_devices("gtp_jax.nn.abstract_model")
    # not `nnx.eval_shape`, which takes every variable for one array: codes are several
    graph, state = jax.eval_shape(lambda: nnx.split(factory(nnx.Rngs(0))))
    _refuse_tracers(nnx.merge(graph, state))

    def place(leaf: Any) -> Any:
        def abstract(a: Any, sharding: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

        value = value_of(leaf)
        if mesh.empty:
            return with_value(leaf, jax.tree.map(abstract, value))
        return with_value(leaf, jax.tree.map(abstract, value, jax.tree.broadcast(_shardings(mesh, leaf), value)))

    return nnx.merge(graph, jax.tree.map(place, state, is_leaf=lambda v: isinstance(v, nnx.Variable)))


def _shardings(mesh: Mesh, leaf: Any) -> Any:
    """Returns how what a variable holds is sharded: a pytree prefix."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), partition_of(leaf), is_leaf=lambda spec: isinstance(spec, PartitionSpec)
    )


def _refuse_tracers(model: nnx.Module) -> None:
    """Refuses arrays that Flax has not recognized as data, as it does not recognize those made under a trace.

    Raises:
        TypeError: naming the module and its attribute.
    """
    for path, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, Tracer):
                raise TypeError(
                    f"{type(module).__name__} at {'.'.join(map(str, path)) or 'the top'} keeps an array in its "
                    f"attribute `{name}`, which Flax takes for a part of the program while a model is built under a "
                    f"trace, as `gtp_jax.init` and `Stack` do. Write `self.{name} = nnx.Variable(...)`, or `nnx.Param` "
                    "if it is trained."
                )
