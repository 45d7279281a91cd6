"""Creates models whose arrays are sharded from the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from ..mesh import check_mesh_in_scope, mesh_of_devices
from ._layer import partition_of, value_of, with_value
from ._owners import name_weights


def init[M: nnx.Module](factory: Callable[[nnx.Rngs], M], rngs: nnx.Rngs) -> M:
    """Builds a model on the mesh in scope, with every array sharded from the start.

    The program that computes the values is compiled with the shardings of its outputs, so that no device holds the
    whole model. Initializers compute the logical arrays, so that models on different meshes start with equal values.

    Args:
        factory: a function that makes the model, such as its class. It is traced once to find the shapes, and once
            under `jax.jit`.
        rngs: the random streams, as for any NNX module.

    Returns:
        The model, with sharded arrays. Each weight stores its path in the model, because recipes match their patterns
        against paths; see `gtp_jax.use_recipe`. Without a mesh, the model is whole on one device, and a warning is
        issued if there are several devices.

    Raises:
        ValueError: if the mesh in scope has Explicit axes, or was put there by `with mesh:`; or if this function is
            called while JAX traces a program.
        TypeError: if a plain attribute of a module is a JAX array that the factory computed, or a list, tuple or dict
            with a JAX array. The message names the module and the attribute.
    """
    check_mesh_in_scope(creates=True)
    graph, make, keys = _birth(factory, rngs)
    model = nnx.merge(graph, make(keys))
    name_weights(model)
    return model


def _birth(factory: Callable[[nnx.Rngs], Any], rngs: nnx.Rngs) -> tuple[Any, Any, Any]:
    """Returns a model's graph, the jitted program that computes its arrays, and that program's argument."""
    mesh = mesh_of_devices("gtp_jax.init")
    streams, keys = nnx.split(rngs)
    # copies, because the model's variables may refer to the streams themselves
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
    """Returns the model with each array replaced by a `jax.ShapeDtypeStruct` that is sharded for the mesh in scope.

    Nothing is allocated, so the mesh may consist of devices that do not exist here. Each weight stores its path,
    as after `init`. The factory is called with `nnx.Rngs(0)`. If the model keeps its `nnx.Rngs` and needs streams of
    certain names, let the factory make them: `abstract_model(lambda _: Model(nnx.Rngs(0, dropout=1)))`.

    Raises:
        ValueError: if the mesh in scope has Explicit axes, or was put there by `with mesh:`; or if this function is
            called while JAX traces a program.
        TypeError: if a plain attribute of a module is a JAX array that the factory computed, or a list, tuple or dict
            with a JAX array. The message names the module and the attribute.
    """
    model = _abstract(factory)
    name_weights(model)
    return model


def _abstract[M: nnx.Module](factory: Callable[[nnx.Rngs], M]) -> M:
    """Returns an abstract model whose weights do not yet store their paths; see `name_weights`."""
    check_mesh_in_scope()
    mesh = mesh_of_devices("gtp_jax.nn.abstract_model")
    # not `nnx.eval_shape`, which assumes that every variable holds one array: quantized weights hold several
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
    """Returns the shardings of a variable's value, as a pytree prefix of it."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_of(leaf))


def _refuse_tracers(model: nnx.Module) -> None:
    """Checks that no module keeps a traced array in a plain attribute, or any array in a list, tuple or dict that is a
    plain attribute. Flax treats a concrete array in an attribute as data, but a traced or abstract one as part of the
    program.

    Raises:
        TypeError: if there is such an attribute. The message names the module and the attribute.
    """
    for path, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, Tracer):
                what = "an array"
            elif isinstance(value, list | tuple | dict) and any(map(_is_array, _leaves(value))):
                what = f"a {type(value).__name__} with an array"
            else:
                continue
            raise TypeError(
                f"{type(module).__name__} at {'.'.join(map(str, path)) or 'the top'} has {what} as its attribute "
                f"`{name}`. While `gtp_jax.init` or `Stack` traces the construction of a model, Flax treats such an "
                "array as part of the program. Wrap it in `nnx.Variable(...)`, or in `nnx.Param` if it is trained."
            )


def _leaves(container: Any) -> list[Any]:
    return jax.tree.leaves(container, is_leaf=lambda node: isinstance(node, nnx.Variable | nnx.Pytree))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, Tracer | jax.Array | jax.ShapeDtypeStruct)
