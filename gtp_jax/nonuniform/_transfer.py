"""Moves arrays between devices with static slices on each device and permutes between devices.

[Note: three programs] What a device sends, and where it puts what it receives, differs from device to device and is
known before anything runs. So each device has one program that fills its buffers and one that takes them apart, both
with static slices. Between them runs one program over all devices that contains a `ppermute` for each round and nothing
else. With a single program over all devices, every slice would depend on the rank, either by a conditional with a
branch per device (on GPUs the host waits for each) or by index tables as long as the weights. Devices that store
nothing before or after the transfer would also need buffers as large as those of the others.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..collectives import moved_in_bits
from ._boxes import Box, intersect, shape_of, within
from ._moves import LeafBoxes, Moves

_AXIS = "device"

Device = Any  # a `jax.Device`, which cannot be used as a type

# For each array, the parts that this process's devices store, by device.
Parts = list[dict[Device, jax.Array]]


class Transfer:
    """Moves arrays between devices according to a plan.

    Every process that has one of the devices must call it, in the same order relative to other programs over these
    devices.

    Args:
        moves: the plan.
        devices: the devices, in the order of their numbers in the plan.
        name: the prefix of the programs' names in profiles: NAME_pack, NAME_permute, NAME_assemble.

    Attributes:
        moves: the plan.
        name: the prefix.
    """

    def __init__(self, moves: Moves, devices: Sequence[Device], name: str = "transfer") -> None:
        self.moves, self.name = moves, name
        self._devices = list(devices)
        self._mesh = Mesh(np.array(self._devices), (_AXIS,))
        self._here = [
            (number, device)
            for number, device in enumerate(self._devices)
            if device.process_index == jax.process_index()
        ]
        self._pack: dict[int, Any] = {}
        self._assemble: dict[int, Any] = {}
        for number, device in self._here:
            self._pack[number] = _on(device, f"{name}_pack", functools.partial(_packed, moves, number))
            self._assemble[number] = _on(device, f"{name}_assemble", functools.partial(_assembled, moves, number))
        self._permute: Any = jax.jit(_named(f"{name}_permute", self._permuted()))

    def __call__(self, parts: Sequence[Mapping[Device, jax.Array]]) -> Parts:
        """Returns the parts that this process's devices store of each array after the transfer.

        Args:
            parts: the parts that this process's devices store of each array before the transfer. Devices that store no
                part of an array are absent.
        """
        received: dict[int, list[jax.Array]] = {number: [] for number, _ in self._here}
        if self.moves.rounds:
            buffers = [self._pack[number](self._own(parts, number)) for number, _ in self._here]
            together = [self._global(one, [b[i] for b in buffers]) for i, one in enumerate(self.moves.rounds)]
            with jax.set_mesh(self._mesh):
                together = self._permute(together)
            for buffer in together:
                shards = {shard.device: shard.data for shard in buffer.addressable_shards}
                for number, device in self._here:
                    received[number].append(shards[device])
        found: Parts = [{} for _ in self.moves.leaves]
        for number, device in self._here:
            own = self._own(parts, number)
            made = self._assemble[number](own, received[number]) if _makes(self.moves, number) else {}
            for leaf, boxes in enumerate(self.moves.leaves):
                if number in boxes.after:
                    # a part that does not change is the same array, not a copy
                    found[leaf][device] = own[leaf] if _stays(self.moves, leaf, number) else made[leaf]
        return found

    def compile(self) -> jax.stages.Compiled:
        """Compiles the program of the rounds and returns it. Later calls use it."""
        sharding = NamedSharding(self._mesh, PartitionSpec(_AXIS))
        sizes = [(len(self._devices) * one.elements, one.dtype) for one in self.moves.rounds]
        buffers = [jax.ShapeDtypeStruct((size,), dtype, sharding=sharding) for size, dtype in sizes]
        if not isinstance(self._permute, jax.stages.Compiled):
            with jax.set_mesh(self._mesh):
                self._permute = self._permute.lower(buffers).compile()
        return self._permute

    def _own(self, parts: Sequence[Mapping[Device, jax.Array]], number: int) -> dict[int, jax.Array]:
        device = self._devices[number]
        return {leaf: parts[leaf][device] for leaf, boxes in enumerate(self.moves.leaves) if number in boxes.before}

    def _global(self, one: Any, buffers: list[jax.Array]) -> jax.Array:
        shape = (len(self._devices) * one.elements,)
        return jax.make_array_from_single_device_arrays(
            shape, NamedSharding(self._mesh, PartitionSpec(_AXIS)), buffers, dtype=one.dtype
        )

    def _permuted(self) -> Callable[[list[jax.Array]], list[jax.Array]]:
        pairs = [[(m.sender, m.receiver) for m in one.messages] for one in self.moves.rounds]

        def permute(buffers: list[jax.Array]) -> list[jax.Array]:
            return [_permuted(buffer, way) for buffer, way in zip(buffers, pairs, strict=True)]

        return jax.shard_map(
            permute, mesh=self._mesh, in_specs=PartitionSpec(_AXIS), out_specs=PartitionSpec(_AXIS), check_vma=False
        )


def parts_of(array: jax.Array) -> dict[Any, jax.Array]:
    """Returns the parts of an array that this process's devices store, by device."""
    return {shard.device: shard.data for shard in array.addressable_shards}


def settled(tree: Any) -> None:
    """Waits for arrays on virtual CPU devices. They share a pool of threads, so programs over different devices could
    otherwise deadlock."""
    if jax.default_backend() == "cpu":
        jax.block_until_ready(tree)


def of_devices(stored: Parts, mesh: Mesh) -> Parts:
    """Returns the parts that the devices of a mesh store."""
    devices = set(mesh.devices.flat)
    return [{device: x for device, x in part.items() if device in devices} for part in stored]


def _permuted(buffer: jax.Array, way: Sequence[tuple[int, int]]) -> jax.Array:
    return moved_in_bits(lambda x: lax.ppermute(x, _AXIS, way), buffer)


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = call.__qualname__ = name
    return call


def _on(device: Device, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function compiled for a device, whatever mesh is in scope, and even if no argument is on the device."""
    mesh = Mesh(np.array([device]), (_AXIS,))
    compiled = jax.jit(_named(name, function), out_shardings=NamedSharding(mesh, PartitionSpec()))

    def call(*args: Any) -> Any:
        with jax.set_mesh(mesh):
            return compiled(*args)

    return call


def _packed(moves: Moves, number: int, own: dict[int, jax.Array]) -> list[jax.Array]:
    """Returns a device's buffers, one per round; they are zeros in rounds in which it sends nothing."""
    buffers = []
    for one in moves.rounds:
        runs = []
        for message in one.messages:
            if message.sender == number:
                for piece in message.pieces:
                    at = within(piece.box, moves.leaves[piece.leaf].before[number])
                    runs.append(jnp.reshape(own[piece.leaf][at], -1))
        left = one.elements - sum(run.size for run in runs)
        if left:
            runs.append(jnp.zeros(left, one.dtype))
        buffers.append(jnp.concatenate(runs) if len(runs) > 1 else runs[0])
    return buffers


def _assembled(moves: Moves, number: int, own: dict[int, jax.Array], received: list[jax.Array]) -> dict[int, jax.Array]:
    """Returns the parts that a device stores after the transfer, for each array whose part on the device changes."""
    pieces: dict[int, list[tuple[Box, jax.Array]]] = defaultdict(list)
    for one, buffer in zip(moves.rounds, received, strict=True):
        for message in one.messages:
            start = 0
            for piece in message.pieces if message.receiver == number else ():
                shape = shape_of(piece.box)
                stop = start + int(np.prod(shape))
                pieces[piece.leaf].append((piece.box, jnp.reshape(buffer[start:stop], shape)))
                start = stop
    for leaf, boxes in enumerate(moves.leaves):
        if number in boxes.after and not _stays(moves, leaf, number):
            before = boxes.before.get(number)
            for box in moves.local[leaf][number]:
                assert before is not None and intersect(before, box) == box
                pieces[leaf].append((box, own[leaf][within(box, before)]))
    made = {
        leaf for leaf, boxes in enumerate(moves.leaves) if number in boxes.after and not _stays(moves, leaf, number)
    }
    return {leaf: _with_padding(moves.leaves[leaf], pieces[leaf], number) for leaf in sorted(made)}


def _with_padding(leaf: LeafBoxes, pieces: list[tuple[Box, jax.Array]], number: int) -> jax.Array:
    """Returns the part that a device stores after the transfer, assembled from its pieces and padded with zeros."""
    box = leaf.after[number]
    if not pieces:
        return jnp.zeros(shape_of(box), leaf.dtype)
    joined = _joined(pieces)
    more = [size - own for size, own in zip(shape_of(box), joined.shape, strict=True)]
    return jnp.pad(joined, [(0, size) for size in more]) if any(more) else joined


def _joined(pieces: list[tuple[Box, jax.Array]], dim: int = 0) -> jax.Array:
    """Returns an array assembled from its pieces, which form a grid."""
    if len(pieces) == 1:
        return pieces[0][1]
    rows: dict[tuple[int, int], list[tuple[Box, jax.Array]]] = defaultdict(list)
    for box, piece in pieces:
        rows[box[dim]].append((box, piece))
    parts = [_joined(rows[interval], dim + 1) for interval in sorted(rows)]
    return jnp.concatenate(parts, axis=dim) if len(parts) > 1 else parts[0]


def _stays(moves: Moves, leaf: int, number: int) -> bool:
    boxes = moves.leaves[leaf]
    return boxes.before.get(number) == boxes.after[number]


def _makes(moves: Moves, number: int) -> bool:
    return any(number in boxes.after and not _stays(moves, leaf, number) for leaf, boxes in enumerate(moves.leaves))
