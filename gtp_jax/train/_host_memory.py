"""Keeps the arrays of a state in the memory of the host."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._words import OFFLOADED
from ..mesh import is_on_host, of_parameter, with_paths
from ..nn import ModelDef

Tree = Any

_KIND = "pinned_host"

# Smaller arrays stay on the device, because starting a copy takes longer than copying their bytes.
_LEAST_ELEMENTS = 1 << 16

# The most that an optimizer's `init` makes on the device before it is moved to the host, in bytes of whole arrays.
_BYTES_PER_PART = 2 << 30

# XLA's limit for the pinned memory of a process, in GiB, and its default (xla/pjrt/gpu/gpu_helpers.cc).
_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DEFAULT_LIMIT = 64


def may_leave(shape: Sequence[int]) -> bool:
    """Returns whether `offload` keeps arrays of this shape on the host."""
    return len(shape) > 1 and math.prod(shape) >= _LEAST_ELEMENTS


def device_shapes(tree: Tree) -> Tree:
    """Returns the shapes and dtypes of arrays, as if all were in the memory of the device."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@dataclasses.dataclass(frozen=True)
class Away:
    """The arrays of a state that are kept in the memory of the host.

    Attributes:
        params: for each parameter, whether it is; empty if nothing is kept there.
        optimizer: for each array of the optimizer's state, whether it is; empty if nothing is kept there.
    """

    params: tuple[bool, ...]
    optimizer: tuple[bool, ...]

    def shapes(self, mesh: Mesh, shapes: tuple[Tree, Tree], specs: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        """Returns the shapes of the parameters and of the optimizer's state, with shardings in the memory of the host
        for those that are kept there.

        Args:
            mesh: the mesh.
            shapes: the shapes of both.
            specs: the partitions of both.

        Raises:
            ValueError: if arrays are kept on the host and there is no mesh, because only a sharding on a mesh gives a
                shape a memory.
        """
        if not any((*self.params, *self.optimizer)):
            return shapes
        if mesh.empty:
            raise ValueError(
                "`offload` is set for an abstract model, but no mesh is in scope, and shapes without a mesh are in no "
                "memory. Create the state under `with jax.set_mesh(gtp_jax.make_mesh(gtp=...)):`, also for one device."
            )
        leaves, structure = jax.tree.flatten(shapes)
        partitions = jax.tree.leaves(specs)
        own = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(mesh, spec)) if moves else leaf
            for leaf, spec, moves in zip(leaves, partitions, (*self.params, *self.optimizer), strict=True)
        ]
        return jax.tree.unflatten(structure, own)

    def moved(self, params: Tree) -> Tree:
        """Returns the parameters, with copies on the host of those that are kept there."""
        if not self.params:
            return params
        leaves, structure = jax.tree.flatten(params)
        return jax.tree.unflatten(structure, map(_kept, leaves, self.params))

    def initial(self, init: Callable[[Tree], Tree], params: Tree, shardings: Tree) -> Tree:
        """Returns the first state of an optimizer. What is kept on the host is made in parts, so that the device never
        holds all of it.

        Args:
            init: the optimizer's `init`.
            params: the parameters, on the device.
            shardings: the shardings of the result on the device; `None` without a mesh.

        Raises:
            ValueError: if the host has too little memory; the message says how much is needed.
        """
        if not any((*self.params, *self.optimizer)):
            return jax.jit(init, out_shardings=shardings)(params)
        shapes, structure = jax.tree.flatten(jax.eval_shape(init, params))
        on = [None] * len(shapes) if shardings is None else jax.tree.leaves(shardings)
        _check_room([*_here(jax.tree.leaves(params), self.params), *_here(shapes, self.optimizer, on)])
        made: dict[int, Any] = {}
        for part in _parts(shapes, self.optimizer):
            own = [on[n] for n in part] if shardings is not None else None
            some = jax.jit(lambda p, part=part: [jax.tree.leaves(init(p))[n] for n in part], out_shardings=own)(params)
            made |= {n: _kept(array, self.optimizer[n]) for n, array in zip(part, some, strict=True)}
            jax.block_until_ready(list(made.values()))
        return jax.tree.unflatten(structure, [made[n] for n in range(len(shapes))])


def choose(offload: Any, params: Tree, init: Callable[[Tree], Tree], model_def: ModelDef, mesh: Mesh) -> Away:
    """Decides what is kept on the host: arrays of a parameter's shape, except small ones and those of parameters with
    update rules.

    Args:
        offload: as for `TrainState.create`.
        params: the parameters or their shapes.
        init: the optimizer's `init`.
        model_def: the definition of the model.
        mesh: the mesh of the state; an empty one for a single device.

    Raises:
        ValueError: if `offload` is an unknown word, the devices cannot address pinned memory of their host, or a weight
            is stored padded.
    """
    if offload is not None and offload not in OFFLOADED:
        allowed = ", ".join(map(repr, OFFLOADED))
        raise ValueError(f"`offload` is {offload!r}; it must be {allowed}, or `None` to keep all on the device.")
    if offload is None:
        return Away((), ())
    _check_kinds(offload, jax.local_devices() if mesh.empty else mesh.local_devices)
    padded = [path for path, _ in with_paths(params) if path in model_def.padded]
    if padded:
        name = ".".join(padded[0])
        raise ValueError(
            f"`offload` is {offload!r}, but the degrees of the mesh do not divide the weight {name!r}, which is stored "
            "padded (`even_shares`), and blocks do not say where padding is. Use degrees that divide it, or create "
            "the model without `even_shares`, or leave `offload` out."
        )
    large = {
        path: leaf.shape
        for path, leaf in with_paths(params)
        if may_leave(leaf.shape) and path not in model_def.update_rules
    }
    moves = lambda path, leaf: of_parameter(path, large) == leaf.shape  # noqa: E731
    of_optimizer = tuple(moves(path, leaf) for path, leaf in with_paths(jax.eval_shape(init, params)))
    return Away(tuple(offload == "masters" and path in large for path, _ in with_paths(params)), of_optimizer)


def check_host(tree: Tree) -> None:
    """Refuses a state for whose arrays on the host there is too little memory.

    Args:
        tree: the arrays of the state or their shapes, with shardings on devices of this machine.

    Raises:
        ValueError: if there is too little memory; the message says how much is needed.
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_on_host(leaf)]
    if leaves:
        _check_room(_here(leaves, [True] * len(leaves)))


def _check_kinds(offload: Any, devices: Sequence[Any]) -> None:
    """Refuses devices that cannot address pinned memory of their host. Those of a target report no memories, and pass.

    Raises:
        ValueError: if they cannot; the message names the memories that they can address.
    """
    kinds = [memory.kind for memory in devices[0].addressable_memories()] if devices else []
    if kinds and _KIND not in kinds:
        raise ValueError(
            f"`offload` is {offload!r}, which needs memory of the kind {_KIND!r}, but {devices[0].device_kind} devices "
            f"of the platform {devices[0].platform!r} address only {', '.join(map(repr, kinds))}. Leave `offload` out."
        )


def _kept(array: jax.Array, on_host: bool) -> jax.Array:
    return jax.device_put(array, jax.memory.Space.Host) if on_host else array


def _parts(shapes: list[Any], away: Iterable[bool]) -> list[list[int]]:
    """Returns the numbers of the arrays of a state in parts: those that stay on the device, and the others in parts of
    `_BYTES_PER_PART` or of a single array."""
    stay, parts, size = [], [[]], 0
    for number, (shape, moves) in enumerate(zip(shapes, away, strict=True)):
        if not moves:
            stay.append(number)
            continue
        size += shape.size * shape.dtype.itemsize
        if parts[-1] and size > _BYTES_PER_PART:
            parts.append([])
            size = shape.size * shape.dtype.itemsize
        parts[-1].append(number)
    return [part for part in (stay, *parts) if part]


def _sharding(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    own = NamedSharding(mesh, spec, memory_kind=_KIND)
    # The devices of a target (`gtp_jax.hlo`) report no memories, and a sharding on them forgets its memory.
    return own if own.memory_kind == _KIND else NamedSharding(mesh.abstract_mesh, spec, memory_kind=_KIND)


def _here(leaves: Iterable[Any], away: Iterable[bool], shardings: Iterable[Any] | None = None) -> list[int]:
    """Returns the bytes that this process keeps of each array that is kept on the host."""
    leaves = list(leaves)
    on = [leaf.sharding for leaf in leaves] if shardings is None else shardings
    sizes = []
    for leaf, sharding, moves in zip(leaves, on, away, strict=True):
        if moves:
            parts = 1 if sharding is None else len(sharding.addressable_devices)
            shape = leaf if sharding is None else jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)
            sizes.append(parts * shape.size * leaf.dtype.itemsize)
    return sizes


def _check_room(sizes: Iterable[int]) -> None:
    """Refuses a state for which the host has too little memory, before any of it is allocated.

    Raises:
        ValueError: if there is too little memory; the message says how much is needed.
    """
    needed, free = sum(sizes), available_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"`offload` keeps {_gib(needed)} of the state in the memory of this host, which has {_gib(free)} "
            "available. Use more hosts, keep less there (`offload='optimizer'`), or an optimizer with less state."
        )
    limit = int(os.environ.get(_LIMIT, _DEFAULT_LIMIT))
    if jax.default_backend() == "gpu" and needed > limit << 30:
        raise ValueError(
            f"`offload` keeps {_gib(needed)} of the state in pinned memory of this host, for which XLA's limit is "
            f"{limit} GiB. Set {_LIMIT}={-(-needed // 2**30) + 1} in the environment before JAX starts."
        )


def available_bytes() -> int | None:
    """Returns the bytes of memory that this host has available; `None` where the system does not say."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
