"""Digests of arrays' values, which do not depend on the mesh that holds the arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._mixing import mixed
from ..mesh import of_all_processes, on_device
from ._checksums import waiting
from ._logical import LogicalArray

# Odd, so that multiplication by them loses no bit. `_LANES` are from the golden ratio and the square root of three.
_LANES = (0x9E3779B1, 0xBB67AE85)
_DIMS = (0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0x2545F491, 0x9FB21C65, 0xE6546B65, 0x1B873593)

_NO_MESH = Mesh(np.empty((), object), ())


class Digests:
    """Computes a digest of 16 hexadecimal digits for each array. Every process must make this call with all arrays.

    A digest is two sums modulo 2^32 over the elements, each of a bijective mix of the element's bits and its indices. A
    sum does not depend on the order of its terms, so the digest does not depend on how the array is sharded. Because
    the mix is bijective, a change of any single element always changes the digest. Each device sums what it holds, in
    one pass and without communication. The computation starts at once, so other work can be done before `result`.

    Args:
        arrays: the arrays by their paths in the state. Only the logical part of a padded array is digested.

    Raises:
        TypeError: if an array has a dtype other than integer, float or bool, or is sharded over several devices by
            anything but a `NamedSharding`.
    """

    def __init__(self, arrays: Mapping[str, jax.Array | LogicalArray]) -> None:
        self._arrays = {name: one.array if isinstance(one, LogicalArray) else one for name, one in arrays.items()}
        with jax.set_mesh(_NO_MESH):  # JAX refuses to compute on devices outside the mesh in scope
            pairs = zip(self._arrays.values(), arrays.values(), strict=True)
            self._launched = [_device_sums(array, one.shape) for array, one in pairs]

    def result(self) -> dict[str, str]:
        """Returns the digests by path.

        Raises:
            ValueError: if the copies of a replicated array differ, naming it.
        """
        arrays = self._arrays
        with waiting():
            pairs = [_own_sums(*one) for one in zip(arrays.values(), self._launched, strict=True)]
            totals = np.array(pairs, np.uint32).reshape(len(arrays), 2, len(_LANES))
            totals = np.sum(of_all_processes(totals), axis=0, dtype=np.uint32)
        return {name: _agreed(name, array, *pair) for (name, array), pair in zip(arrays.items(), totals, strict=True)}


class Digest:
    """Computes the digest of one array whose parts are in memory one at a time, in any order."""

    def __init__(self) -> None:
        self._parts: dict[int, np.ndarray] = {}

    def add(self, begin: int, part: np.ndarray) -> None:
        """Adds a part of the array, which begins at index `begin` of the first dimension. Replaces the part that was
        added with the same index."""
        size = part.dtype.itemsize
        # Words of 32 bits, because 64-bit types may be disabled in JAX; the bits are the same.
        words = part.view(f"uint{8 * min(size, 4)}")
        if size == 8:
            words = words.reshape(*part.shape, 2)
        self._parts[begin] = np.asarray(_part_sums(words, np.uint32(begin)))

    def text(self) -> str:
        """Returns the digest as text; see `Digests`."""
        return _text(np.array([*self._parts.values()]).reshape(-1, len(_LANES)).sum(axis=0, dtype=np.uint32))


def _text(sums: np.ndarray) -> str:
    return "".join(f"{int(value):08x}" for value in sums)


def _device_sums(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the sums of each device's part, `(devices, lanes)`, of an array whose logical part has this shape."""
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        return _sums_on(sharding.mesh, sharding.spec, array.ndim, None if shape == array.shape else shape)(array)
    if len(sharding.device_set) > 1:
        raise TypeError(f"an array with {sharding} has no digest; place it with a `NamedSharding`.")
    return _whole_sums(array)


@functools.cache
def _sums_on(mesh: Any, spec: PartitionSpec, ndim: int, shape: tuple[int, ...] | None) -> Any:
    axes = (*spec, *(None,) * (ndim - len(spec)))

    def sums(part: jax.Array) -> jax.Array:
        begins = [0 if a is None else lax.axis_index(a) * n for a, n in zip(axes, part.shape, strict=True)]
        return _sums(part, begins, shape)[None]

    whole_mesh = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=spec, out_specs=whole_mesh, check_vma=False))


def _own_sums(array: jax.Array, sums: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Returns two sums over this process's devices: over the first copy of each part, and over all copies."""
    parts = {shard.device: np.asarray(shard.data).reshape(-1) for shard in sums.addressable_shards}
    none = np.zeros(len(_LANES), np.uint32)
    shards = array.addressable_shards
    return sum((parts[s.device] for s in shards if s.replica_id == 0), none), sum(parts.values(), none)


def _agreed(name: str, array: jax.Array, first: np.ndarray, all_copies: np.ndarray) -> str:
    """Returns the digest of an array, given the sums over one copy of it and over all its copies.

    Raises:
        ValueError: if the copies differ; names the array.
    """
    cuts = [-(-n // part) for n, part in zip(array.shape, array.sharding.shard_shape(array.shape), strict=True)]
    copies = len(array.sharding.device_set) // math.prod(cuts)
    if (first * np.uint32(copies) != all_copies).any():
        raise ValueError(
            f"`{name}` of the state is replicated, but its copies differ between devices: one of them has computed or "
            "transferred wrong data. Restore the last checkpoint; if it happens again, replace the device."
        )
    return _text(first)


@jax.jit
def _whole_sums(array: jax.Array) -> jax.Array:
    return _sums(array, [0] * array.ndim)[None]


@jax.jit
def _part_sums(words: jax.Array, begin: jax.Array) -> jax.Array:
    return _sums(words, [begin, *(0,) * (words.ndim - 1)])


def _sums(array: jax.Array, begins: Sequence[Any], shape: tuple[int, ...] | None = None) -> jax.Array:
    """Returns the sums over a part of an array that begins at the indices `begins`; if `shape` is given, over those of
    its elements that lie within an array of this shape."""
    words = _words(on_device(array))
    place = jnp.zeros(words.shape, jnp.uint32)
    for dim, begin in enumerate((*begins, *(0,) * (words.ndim - len(begins)))):
        constant = jnp.uint32(_DIMS[dim % len(_DIMS)] + 2 * (dim // len(_DIMS)))
        place += (lax.broadcasted_iota(jnp.uint32, words.shape, dim) + jnp.asarray(begin, jnp.uint32)) * constant
    hashes = [mixed(words * jnp.uint32(lane) ^ place) for lane in _LANES]
    if shape is not None:
        within = jnp.ones((), jnp.bool_)
        for dim, (begin, size) in enumerate(zip(begins, shape, strict=True)):
            within &= lax.broadcasted_iota(jnp.int32, words.shape, dim) + begin < size
        hashes = [jnp.where(within, one, 0) for one in hashes]
    # One reduction for both sums: with two, XLA would make a pass for each, five times as slow on CPU.
    zeros = [jnp.uint32(0) for _ in _LANES]
    return jnp.stack(lax.reduce(hashes, zeros, _added, tuple(range(words.ndim))))


def _added(left: list[jax.Array], right: list[jax.Array]) -> list[jax.Array]:
    return [a + b for a, b in zip(left, right, strict=True)]


def _words(array: jax.Array) -> jax.Array:
    """Returns the elements' bits in 32-bit words; elements of 64 bits add a trailing dimension of size two."""
    kind: Any = array.dtype
    if kind == jnp.bool_:
        return array.astype(jnp.uint32)
    bits = jnp.iinfo(kind).bits if jnp.issubdtype(kind, jnp.integer) else 0
    bits = jnp.finfo(kind).bits if jnp.issubdtype(kind, jnp.floating) else bits
    if not bits:
        raise TypeError(f"an array of {kind} has no digest; it must hold integers, floats or booleans.")
    if bits == 64:
        return lax.bitcast_convert_type(array, jnp.uint32)
    return lax.bitcast_convert_type(array, f"uint{bits}").astype(jnp.uint32)
