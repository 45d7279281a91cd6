"""Reads which ranks take part in a collective together, from the notations that XLA prints."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Collection, Mapping

import numpy as np

from ._hlo import mesh_sizes

Groups = tuple[tuple[int, ...], ...]  # one row per group of ranks

_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")  # 'x', or 'x':(2)4 for a part of x
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"replica_groups=\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")


def axes_named(attributes: str) -> tuple[str, ...] | None:
    """Returns the mesh axes that a collective names, or `None` if it lists its ranks in another way."""
    named = _NAMED.search(attributes)
    return tuple(axis for axis, _, _ in _AXIS.findall(named[2])) if named else None


def groups_over(sizes: Mapping[str, int], axes: Collection[str]) -> Groups:
    """Returns the ranks of a mesh that differ only in their positions on some axes, as positions in the mesh, one row
    per group.

    Args:
        sizes: the sizes of the axes of the mesh, outermost first.
        axes: the axes over which the ranks of a group differ.
    """
    return _grouped(tuple(sizes.values()), tuple(axis in axes for axis in sizes))


def replica_groups(attributes: str, devices: int) -> Groups:
    """Returns the ranks that take part together, as positions in the mesh of the program, one row per group. For a
    permutation, these are the ranks that its pairs connect.

    Args:
        attributes: the text of a collective's attributes.
        devices: the number of devices of the program, which are one group if the text names none.
    """
    for notation, read in ((_NAMED, _by_axes), (_IOTA, _by_iota), (_LISTED, _listed), (_PAIRS, _connected)):
        match = notation.search(attributes)
        if match:
            return read(*match.groups())
    return (tuple(range(devices)),)


@functools.cache
def _by_axes(mesh: str, axes: str) -> Groups:
    """Splits axes where their parts begin and end, and groups the ranks that differ only in parts that are named."""
    sizes = mesh_sizes(mesh)
    parts = [(axis, int(before or 1), int(part or sizes[axis])) for axis, before, part in _AXIS.findall(axes)]
    shape: list[int] = []
    grouped: list[int] = []
    for axis, size in sizes.items():
        own = [(before, before * part) for name, before, part in parts if name == axis]
        cuts = sorted({1, size}.union(*own))
        for begin, end in itertools.pairwise(cuts):
            if any(first <= begin and end <= last for first, last in own):
                grouped.append(len(shape))
            shape.append(end // begin)
    return _grouped(tuple(shape), tuple(i in grouped for i in range(len(shape))))


@functools.cache
def _grouped(shape: tuple[int, ...], grouped: tuple[bool, ...]) -> Groups:
    order = sorted(range(len(shape)), key=lambda i: grouped[i])
    ranks = np.arange(math.prod(shape)).reshape(shape).transpose(*order)
    return _rows(ranks.reshape(-1, math.prod(itertools.compress(shape, grouped))))


@functools.cache
def _by_iota(count: str, size: str, shape: str, order: str | None) -> Groups:
    dims = [int(n) for n in shape.split(",")]
    axes = [int(n) for n in order.split(",")] if order else range(len(dims))
    return _rows(np.arange(math.prod(dims)).reshape(dims).transpose(*axes).reshape(int(count), int(size)))


@functools.cache
def _listed(groups: str) -> Groups:
    return tuple(tuple(int(rank) for rank in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", groups))


@functools.cache
def _connected(pairs: str) -> Groups:
    groups: dict[int, set[int]] = {}
    for source, target in re.findall(r"(\d+),(\d+)", pairs):
        joined = groups.get(int(source), {int(source)}) | groups.get(int(target), {int(target)})
        groups.update(dict.fromkeys(joined, joined))
    return tuple(sorted({tuple(sorted(group)) for group in groups.values()}))


def _rows(ranks: np.ndarray) -> Groups:
    return tuple(map(tuple, ranks.tolist()))
