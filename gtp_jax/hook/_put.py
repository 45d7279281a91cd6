"""Puts the values of variables on the mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from .. import layout
from ..mesh import axes_of, degree, legacy_mesh
from ..variables import PaddedParam, make_padded, warn_optimizer
from ._moments import place_if_it_fits
from ._path import WeightPaths
from ._placement import Placement
from ._shards import refuse_read
from ._specs import annotation
from ._variables import Paths


def put(paths: Paths, variable: nnx.Variable, placement: layout.Placement | None, *, own: bool) -> None:
    """Puts the value of a variable on the mesh, and records in the metadata of the variable what later calls need.

    Args:
        paths: the paths of the variable.
        variable: the variable.
        placement: the placement of a weight; `None` for a variable that is stored whole or as annotated.
        own: whether the variable is within one of gtp_jax's own layers.
    """
    if placement is not None:
        padded = bool(placement.padding.size)
        placement = Placement(**{**vars(placement), "kind": PaddedParam if padded else type(variable)})
        if padded:
            make_padded(variable, placement.without_whole_first)
        stored = tuple(placement.stored)
        names = WeightPaths(tuple(tuple(map(str, path)) for path in paths))
        variable.set_metadata(out_sharding=stored, placement=placement, weight_paths=names)
        _hook_first(variable, "on_get_value", refuse_read)
        # An optimizer's variables copy this metadata. With `None`, `nnx.use_eager_sharding` decides whether Flax places
        # their arrays. With `False`, Flax does not: its error for a moment of another shape than the weight would
        # replace that of `refuse_optimizer`.
        variable.set_metadata(eager_sharding=False if padded else None)
        if (mesh := legacy_mesh()) is not None:  # Flax finds no mesh in scope when it makes an optimizer's variables
            variable.set_metadata(mesh=mesh)
    named = annotation(variable) or ()
    known = axes_of(PartitionSpec(*named)) <= set(jax.sharding.get_abstract_mesh().axis_names)
    spec = PartitionSpec(*named) if known else PartitionSpec()
    parts = tuple(sorted(axis for axis in axes_of(spec) if degree(axis) > 1))
    if placement is None and parts and not own and "layout" not in variable.get_metadata():  # a `gtp_jax.Param` has one
        variable.set_metadata(parted=parts)
    if spec and not own and (placement is None or not placement.padding.size):
        _hook_first(variable, "on_create_value", place_if_it_fits)
    if placement is not None and placement.even is not None:
        _hook_first(variable, "on_create_value", warn_optimizer)
    value = variable.get_raw_value()
    if placement is not None:
        value = jax.tree.map(lambda array: _padded(array, placement), value)
    variable.set_raw_value(jax.tree.map(lambda array: on_mesh(array, spec), value))


class _OwnHooks(tuple[Any, ...]):
    """Hooks of gtp_jax alone. Its truth value is false, because NNX warns if a new variable, such as one of an
    optimizer that has copied the metadata, has hooks whose truth value is true."""

    def __bool__(self) -> bool:
        return False


def _hook_first(variable: nnx.Variable, name: str, hook: Any) -> None:
    """Makes `hook` the first of a variable's hooks of this name, such as `on_get_value`."""
    hooks = variable.get_metadata().get(name)
    before = hooks if isinstance(hooks, tuple) else () if hooks is None else (hooks,)
    kind = tuple if hooks else _OwnHooks
    variable.set_metadata(name, kind((hook, *(other for other in before if other is not hook))))


def _padded(value: Any, placement: layout.Placement) -> Any:
    """Pads an array of the logical shape to the stored shape; returns any other value unchanged."""
    if not placement.padding.size or getattr(value, "shape", None) != placement.shape:
        return value
    return layout.pad(value, placement)


def on_mesh(value: Any, spec: PartitionSpec) -> Any:
    if isinstance(value, Tracer):
        extended = jnp.issubdtype(value.dtype, jax.dtypes.extended)
        return value if extended else lax.with_sharding_constraint(value, spec)
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(_mesh(), spec))
    if isinstance(value, jax.Array | np.ndarray):
        return jax.device_put(value, NamedSharding(_mesh(), spec))
    return value


def is_elsewhere(value: Any) -> bool:
    """Returns whether a value is a concrete JAX array on more or fewer devices than the mesh in scope has."""
    concrete = isinstance(value, jax.Array) and not isinstance(value, Tracer)
    return concrete and len(value.sharding.device_set) != jax.sharding.get_abstract_mesh().size


def _mesh() -> Any:
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # in a trace
        return jax.sharding.get_abstract_mesh()
    return jax.sharding.get_abstract_mesh() if mesh.empty else mesh  # without devices, as for `inspect`
