"""The base of every module: one call that works without a mesh, in global view and inside a `shard_map`."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ..mesh import BATCH_AXES, TP, Layout, current_view, degree, degrees, stacked_spec


def layout_of(variable: nnx.Variable) -> Layout | None:
    """The layout of a weight that is cut over gtp, from its metadata; `None` for any other variable.

    A weight is a plain `nnx.Param`, so that Flax, its Linen bridge above all, treats it as one.
    """
    return variable.get_metadata().get("layout")


def partition_of(variable: nnx.Variable) -> PartitionSpec:
    """The partition of a variable's array, with the leading dimensions of a stack; whole if it names none."""
    layout = layout_of(variable)
    if layout is not None:
        return stacked_spec(layout.spec, variable.get_value().ndim)
    return PartitionSpec(*(variable.get_metadata().get("out_sharding") or ()))


class Layer(nnx.Module):
    """A module that finds its own way: see `current_view`.

    Without a mesh, or inside a `shard_map`, a call is `local`. In global view it opens a `shard_map` around itself,
    and finds itself in local view there.

    Attributes:
        sequence_parallel: whether activations between layers are cut along the sequence, over tp.
    """

    sequence_parallel: bool

    @abc.abstractmethod
    def local(self, x: Any) -> Any:
        """The call on this rank's part."""

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        """Partitions of input and output in global view; `ndim` is the input's. By default those between layers."""
        del ndim
        return between_layers(self.sequence_parallel), between_layers(self.sequence_parallel)

    def __call__(self, x: Any) -> Any:
        if current_view() != "global":
            return self.local(x)
        return in_shard_map(self, x, *self.partitions(jnp.ndim(x)))


def between_layers(sequence_parallel: bool) -> PartitionSpec:
    """Partition of activations between layers, `(batch, sequence, features)`: features whole."""
    if sequence_parallel and degree(TP) > 1:
        return PartitionSpec(BATCH_AXES, TP)
    return PartitionSpec(BATCH_AXES)


def inside_layer(ndim: int) -> PartitionSpec:
    """Partition of activations inside a parallel layer: features cut over tp."""
    return PartitionSpec(BATCH_AXES, *(None,) * (ndim - 2), TP)


def in_shard_map(module: nnx.Module, x: jax.Array, into: PartitionSpec, out: PartitionSpec) -> Any:
    """Calls a module, in global view, on every rank's own part.

    Args:
        module: is called with `x` inside the `shard_map`.
        x: `(batch, ...)`.
        into: partition of `x`.
        out: partition of the result, or of each array in it.

    Raises:
        ValueError: if the mesh does not divide the batch or the sequence, or the model was built for another mesh.
    """
    _check_input(x, into, type(module).__name__)
    graph, state = nnx.split(module)
    variables, tree = jax.tree.flatten(state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    for variable in variables:
        layout = layout_of(variable)
        if layout is not None:
            check_degrees(cut_of(layout), f"the weight of shape {layout.shape} of {type(module).__name__}")

    def local(values: list[jax.Array], x: jax.Array) -> Any:
        put = [v.replace(value) for v, value in zip(variables, values, strict=True)]
        return nnx.merge(graph, jax.tree.unflatten(tree, put))(x)

    specs = [partition_of(v) for v in variables]
    values = [v.get_value() for v in variables]
    return jax.shard_map(local, in_specs=(specs, into), out_specs=out, check_vma=False)(values, x)


def _check_input(x: jax.Array, into: PartitionSpec, name: str) -> None:
    if x.ndim < max(1, len(into)):
        raise ValueError(f"{name} takes (batch, sequence, features) under this mesh; the input has shape {x.shape}.")
    batch = degrees(BATCH_AXES)
    if x.shape[0] % batch:
        raise ValueError(
            f"the input of {name} has shape {x.shape}; its first dimension is the batch and must be a multiple of "
            f"dp * gtp = {batch}. Pad the batch, or choose other degrees."
        )
    if len(into) > 1 and into[1] == TP and x.ndim > 2 and x.shape[1] % degree(TP):
        raise ValueError(
            f"{name} is sequence parallel over tp = {degree(TP)}, and its input has shape {x.shape}; dimension 1 is "
            "the sequence and must be a multiple of tp. Pad the sequence, or pass `sequence_parallel=False`."
        )


class Cut(NamedTuple):
    """What of a layout depends on the mesh: the slices' axes, the product of their degrees, and that of tp."""

    axes: tuple[str, ...]
    slices: int
    tp: int


def cut_of(layout: Layout) -> Cut:
    """A layout's cut."""
    return Cut(layout.axes, layout.gtp, layout.tp)


def check_degrees(built_for: Cut, name: str) -> None:
    """Refuses weights whose layouts are for other degrees than the mesh in scope has.

    Raises:
        ValueError: naming both, and the remedy.
    """
    here = Cut(built_for.axes, degrees(built_for.axes), degree(TP))
    if built_for != here:
        axes = " * ".join(here.axes)
        raise ValueError(
            f"{name} was built for {axes} {built_for.slices} x tp {built_for.tp}; the mesh in scope has {axes} "
            f"{here.slices} x tp {here.tp}. Build the model under that mesh: `with jax.set_mesh(mesh): model = "
            "gtp_jax.init(...)`."
        )
