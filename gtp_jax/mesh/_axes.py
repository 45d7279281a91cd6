"""Mesh axes: their names, their order, and whether traced code sees global or local arrays."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from .._foreign import brief
from .._words import CP, DP, EP, GTP, TP
from ._degrees import check_degrees, fill_degrees

# Outermost first. tp is innermost, so that its ranks are neighbors.
AXES = (DP, GTP, TP)

View = Literal["plain", "global", "local"]


# What other libraries call our axes.
_ALSO_CALLED = {
    GTP: ("fsdp", "shard", "shards", "sharding", "zero", "zero3", "dp_shard", "weights"),
    DP: ("data", "ddp", "hsdp", "replica", "replicas", "replicate", "dp_replicate", "batch"),
    TP: ("tensor", "model", "mp", "tensor_parallel"),
    CP: ("sp", "seq", "sequence", "context", "context_parallel", "ulysses"),
    EP: ("expert", "experts", "expert_parallel"),
}


def make_mesh(
    *, dp: int | None = None, gtp: int = 1, cp: int = 1, ep: int = 1, tp: int = 1, devices: Any = None, **others: Any
) -> Mesh:
    """Returns a device mesh with the axes `dp`, `gtp` and `tp`, in that order. If their degrees are above 1, the axes
    `cp` and `ep` are inserted before `tp`, in this order; otherwise the mesh has no such axes.

    Args:
        dp: the number of replicas of the sharded weights. `None` uses all devices that the other degrees leave over.
        gtp: the number of shards of a weight, which are gathered just before use.
        cp: the context-parallel degree: the number of ranks that divide the tokens of each sequence. They shard weights
            as the gtp ranks do, so that weights and optimizer state take no more memory.
        ep: the expert-parallel degree: the number of ranks that divide the experts of each layer and exchange tokens
            (`MoE`). They work on different examples, and shard dense weights as the gtp ranks do.
        tp: the tensor-parallel degree.
        devices: the devices to use; all of them by default.
        others: none; names of other libraries are refused with ours.

    Raises:
        TypeError: if there is another argument; the message names the axis that it may mean.
        ValueError: if a degree is not a whole number of at least 1, or their product is not the number of devices, or,
            without `dp`, does not divide it.
    """
    for name, value in others.items():
        means = [f" Did you mean `{axis}={brief(value)}`?" for axis, names in _ALSO_CALLED.items() if name in names]
        raise TypeError(
            f"`{name}` is no argument of `make_mesh`, whose degrees are `dp` (replicas), `gtp` (shards of each weight, "
            "as in FSDP), `cp` (parts of each sequence), `ep` (experts) and `tp` (tensor parallelism)."
            f"{''.join(means)} For axes of other names, use `jax.make_mesh` and declare their roles with "
            "`gtp_jax.mesh.use_roles(gtp_jax.mesh.Roles(...))`."
        )
    array = np.asarray(jax.devices() if devices is None else devices, dtype=object).reshape(-1)
    sizes = fill_degrees({DP: dp, GTP: gtp, **rare_degrees(cp=cp, ep=ep), TP: tp}, array.size)
    given = {name: size for name, size in sizes.items() if size > 1 and not (name == DP and dp is None)}
    product = math.prod(given.values())
    if dp is None and array.size % product:
        words = " x ".join(f"{name} {size}" for name, size in given.items())
        raise ValueError(
            f"{words} = {product}, which does not divide the {array.size} devices. Choose degrees "
            "whose product does, and `dp` is the rest, or pass `devices`."
        )
    check_degrees(sizes, array.size, remedy=", or pass `devices`")
    shape, names = tuple(sizes.values()), tuple(sizes)
    types = (AxisType.Auto,) * len(names)
    if devices is None:
        return jax.make_mesh(shape, names, axis_types=types)  # may reorder the devices for the topology
    return Mesh(array.reshape(shape), names, axis_types=types)


def rare_degrees(*, cp: int, ep: int) -> dict[str, int]:
    """Returns the degrees, in the order of the mesh, of the axes that it has only if their degree is not 1."""
    return {axis: size for axis, size in ((CP, cp), (EP, ep)) if size != 1}


def current_view() -> View:
    """Returns how the code being traced sees arrays.

    `plain`: no mesh is in scope. `global`: a mesh is in scope, and arrays have their global shapes. `local`: inside a
    `shard_map`, where each rank sees its own part.

    Raises:
        ValueError: inside a `shard_map` that is manual over only some of the mesh axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return "plain"
    if not mesh.manual_axes:
        return "global"
    if set(mesh.manual_axes) != set(mesh.axis_names):
        raise ValueError(
            f"gtp_jax needs a shard_map that is manual over every mesh axis; this one is manual over "
            f"{sorted(mesh.manual_axes)} of {mesh.axis_names}. Leave out `axis_names=` in `jax.shard_map`."
        )
    return "local"


def degree(axis: str | None) -> int:
    """Returns the size of an axis of the mesh in scope; 1 if no mesh is in scope or the axis is `None`.

    Raises:
        ValueError: if the mesh in scope has no such axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or axis is None:
        return 1
    if axis not in mesh.shape:
        raise ValueError(
            f"the mesh in scope has the axes {mesh.axis_names}, and none named {axis!r}. "
            "Build it with `gtp_jax.make_mesh(dp=..., gtp=..., tp=...)`; a degree of 1 is fine. For axes of your own, "
            "declare their roles with `gtp_jax.mesh.use_roles(gtp_jax.mesh.Roles(...))`."
        )
    return mesh.shape[axis]


def degrees(axes: tuple[str, ...]) -> int:
    """Returns the product of the sizes of these axes of the mesh in scope."""
    return math.prod(degree(axis) for axis in axes)
