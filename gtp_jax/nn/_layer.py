"""The base of every module: one call that works without a mesh, in global view and inside a `shard_map`."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from ..layout import Layout
from ..mesh import Roles, check_mesh_in_scope, current_roles, current_view, degree, degrees, stacked_spec, use_roles
from ..weights import Gathered, Stored
from ._ranks import on_ranks, ranks_spec


def layout_of(variable: nnx.Variable) -> Layout | None:
    """Returns the layout of a weight that is gathered, from its metadata; `None` for any other variable.

    A weight is a plain `nnx.Param`, so that Flax, its Linen bridge above all, treats it as one.
    """
    return variable.get_metadata().get("layout")


def partition_of(variable: nnx.Variable) -> PartitionSpec:
    """Returns the partition of a variable's array, with the leading dimensions of a stack; whole if it names none."""
    layout = variable.get_metadata().get("array") or layout_of(variable)  # an array of any shape has both
    if layout is not None:
        return stacked_spec(layout.spec, variable.get_value().ndim)
    return PartitionSpec(*(variable.get_metadata().get("out_sharding") or ()))


def check_shape(variable: nnx.Variable, owner: str) -> None:
    """Refuses a weight that holds an array of another shape than its own: on a rank that is not seen.

    Args:
        variable: perhaps of all layers of a stack.
        owner: names what it belongs to.

    Raises:
        ValueError: naming both shapes.
    """
    metadata = variable.get_metadata()
    layout, shape = metadata.get("array") or metadata.get("layout"), getattr(variable.get_raw_value(), "shape", None)
    if layout is None or shape is None or current_view() == "local":
        return
    ahead = len(shape) - len(layout.shape)
    if ahead not in (0, 1) or tuple(shape[ahead:]) != layout.shape:
        raise ValueError(
            f"the weight of shape {layout.shape} of {owner} holds an array of shape {tuple(shape)}. Put an array of "
            "its own shape there, the logical one on every mesh: `kernel[...] = array`, which also keeps it sharded."
        )


class Layer(nnx.Module):
    """A module that finds its own way: see `current_view`.

    Without a mesh, or inside a `shard_map`, a call is `local`. In global view it opens a `shard_map` around itself,
    and finds itself in local view there.

    Attributes:
        sequence_parallel: whether activations between layers are sharded along the sequence, over the tensor axis.
    """

    sequence_parallel: bool

    def __init__(self) -> None:
        self._roles = current_roles()

    @property
    def roles(self) -> Roles:
        """The roles of mesh axes in scope when it was built; those in scope now if it never called `__init__` here."""
        return getattr(self, "_roles", None) or current_roles()

    @abc.abstractmethod
    def local(self, x: Any) -> Any:
        """Computes the call on this rank's part."""

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        """Partitions of input and output in global view; `ndim` is the input's. By default those between layers."""
        between = between_layers(self.roles, self.sequence_parallel and ndim > 2)
        return between, between

    def from_global(self, x: Any) -> Any:
        """Returns this rank's input, from what `partitions` leaves it of a global array."""
        return x

    def to_global(self, y: Any) -> Any:
        """Returns what `partitions` wants of this rank's output: the inverse of `from_global` behind the layer."""
        return y

    def __call__(self, x: Any) -> Any:
        check_mesh_in_scope()
        if current_view() != "global":
            return self.local(x)
        return in_shard_map(self, x, *self.partitions(jnp.ndim(x)))


def between_layers(roles: Roles, sequence_parallel: bool) -> PartitionSpec:
    """Returns the partition of activations between layers, `(batch, sequence, features)`: features whole."""
    if sequence_parallel and degree(roles.tensor) > 1:
        return PartitionSpec(roles.batch, roles.tensor)
    return PartitionSpec(roles.batch)


def inside_layer(roles: Roles, ndim: int, *, even: bool = True) -> PartitionSpec:
    """Returns the partition of activations inside a parallel layer: features sharded over the tensor axis, or whole if
    it does not divide them evenly, as global arrays cannot be sharded so."""
    if not even:
        return PartitionSpec(roles.batch)
    return PartitionSpec(roles.batch, *(None,) * (ndim - 2), roles.tensor)


def in_shard_map(module: Layer, x: jax.Array, into: PartitionSpec, out: PartitionSpec) -> Any:
    """Calls a module, in global view, on every rank's own part.

    Args:
        module: is called with `x` inside the `shard_map`.
        x: `(batch, ...)`.
        into: partition of `x`.
        out: partition of the result, or of each array in it.

    Raises:
        ValueError: if the mesh does not divide the batch or the sequence, or the model was built for another mesh.
    """
    roles = module.roles
    _check_input(x, into, roles, type(module).__name__)
    graph, state = nnx.split(module)
    variables, tree = jax.tree.flatten(state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    for variable in variables:
        layout = layout_of(variable)
        if layout is not None:
            layout.check_mesh(f"the weight of shape {layout.shape} of {type(module).__name__}")
            check_shape(variable, type(module).__name__)

    def local(values: list[Any], x: jax.Array) -> Any:
        put = [v.replace(_on_rank(value)) for v, value in zip(variables, values, strict=True)]
        merged = nnx.merge(graph, jax.tree.unflatten(tree, put))
        with use_roles(roles):
            y = merged.to_global(merged(merged.from_global(x)))
        _refuse_writes(put, merged)
        return y

    specs = [_value_spec(v) for v in variables]
    values = [_for_view(v.get_raw_value()) for v in variables]
    return on_ranks(local, (specs, into), out)(values, x)


def _refuse_writes(before: list[nnx.Variable], module: nnx.Module) -> None:
    """Refuses a call that has written variables, which every rank would have written for itself."""
    values = {id(v.get_raw_value()) for v in before}
    for path, v in nnx.to_flat_state(nnx.split(module)[1]):
        if not isinstance(v, nnx.Param) and any(id(leaf) not in values for leaf in [v.get_raw_value()]):
            raise ValueError(
                f"a call of {type(module).__name__} writes {'.'.join(map(str, path))}, a {type(v).__name__}. A "
                "`gtp_jax.nn.Layer` computes on each rank's own part, where what is written would be one rank's alone. "
                "Write it in an `nnx.Module` that calls the layer; or hand the layer what it needs, such as a key."
            )


def _value_spec(variable: nnx.Variable) -> Any:
    """Returns the partition of what a variable holds, in global view: a pytree prefix."""
    value = variable.get_raw_value()
    if isinstance(value, Stored):
        layout = layout_of(variable)
        assert layout is not None
        shard = stacked_spec(layout.spec, value.shard.ndim)
        stacked = value.groups[0][0].stack is not None
        return Stored(shard, value.groups, ranks_spec(stacked=stacked), PartitionSpec())  # pyright: ignore[reportArgumentType]
    if isinstance(value, Gathered):
        return Gathered(ranks_spec(), value.group, PartitionSpec())  # pyright: ignore[reportArgumentType]
    return PartitionSpec() if value is None else partition_of(variable)


def _for_view(value: Any) -> Any:
    """Returns a variable's value, with keys for the call made now."""
    keys = value.keys if isinstance(value, Stored | Gathered) else None
    return value if keys is None else dataclasses.replace(value, keys=keys.for_view())


def _on_rank(value: Any) -> Any:
    """Returns a variable's value inside the `shard_map`, with keys of this rank's own."""
    keys = value.keys if isinstance(value, Stored | Gathered) else None
    if keys is None:
        return value
    rank = lax.axis_index(jax.sharding.get_abstract_mesh().axis_names).astype(jnp.uint32)
    return dataclasses.replace(value, keys=keys.of_rank(rank))


def _check_input(x: jax.Array, into: PartitionSpec, roles: Roles, name: str) -> None:
    if x.ndim < max(1, len(into)):
        raise ValueError(f"{name} takes (batch, sequence, features) under this mesh; the input has shape {x.shape}.")
    batch, tensor = degrees(roles.batch), roles.tensor
    if x.shape[0] % batch:
        raise ValueError(
            f"the input of {name} has shape {x.shape}; its first dimension is the batch and must be a multiple of "
            f"{' * '.join(roles.batch)} = {batch}. Pad the batch, or choose other degrees."
        )
    if len(into) > 1 and tensor is not None and into[1] == tensor and x.ndim > 2 and x.shape[1] % degree(tensor):
        raise ValueError(
            f"{name} is sequence parallel over {tensor} = {degree(tensor)}, and its input has shape {x.shape}; "
            f"dimension 1 is the sequence and must be a multiple of {tensor}. Pad the sequence, or pass "
            "`sequence_parallel=False`."
        )
