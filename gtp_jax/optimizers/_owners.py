"""Runs a function of whole matrices on one owner rank for each matrix.

[Note: owners] The ranks have parts of every matrix. Each class of matrices (of one shape, divided by the same axes) is
exchanged by an all-to-all over the axes that divide it: a rank sends its parts of the matrices that another rank owns,
and gets all parts of those that it owns itself. The results return in the same way. With R owners, a rank sends
(R - 1) / R of the size of its own parts each way; gathering every matrix on every rank takes R - 1 times that size.

Equally many matrices of a class are owned by each rank, in one batch. What is left of all classes, up to R - 1 matrices
of each, is shared by cost (`owners_of_rest`), and exchanged together; a rank runs the function only for its own. The
alternative is to divide these matrices too: five Newton-Schulz iterations of an m x n matrix in columns would
reduce-scatter and gather an m x m matrix twice in each, 15 m^2 elements per matrix and rank, where an exchange takes
2 m n / R.

Where ranks have copies of a part, as the replicas of dp without ZeRO do, they share the matrices too, and gather the
results. A gathered element is 4 bytes; iterating it takes 20 m to 30 m operations. At 400 TFLOP/s these take longer
than the gather from m = 200 on over NVLink (450 GB/s), and from m = 1600 on over a network of 50 GB/s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from ..mesh import degrees
from ._divided import Divided, Matrices
from ._shares import Load, owners_of_rest

Tree = Any
Function = Callable[..., jax.Array]


def on_owners(
    function: Function,
    cost: Callable[[int, int], float],
    arrays: Sequence[jax.Array],
    matrices: Sequence[Matrices],
    *args: Any,
) -> list[jax.Array]:
    """Returns the results of a function of matrices, each of which is computed by one rank of the mesh in scope.

    Under `jax.vmap`, the mapped arrays are stacks of matrices, which are shared as well.

    Args:
        function: a function `(matrices, *args) -> results` of matrices of one shape, `(count, rows, columns)`, that
            treats each by itself, and returns results of the same shape.
        cost: a function of the rows and columns of a matrix that returns its work.
        arrays: the arrays that hold the matrices.
        matrices: what each array holds.
        args: arrays that are the same for all matrices.
    """

    @custom_vmap
    def run(arrays: list[jax.Array], args: tuple[Any, ...]) -> list[jax.Array]:
        return _run(function, cost, arrays, matrices, args)

    @run.def_vmap
    def _(size: int, batched: Any, arrays: list[jax.Array], args: tuple[Any, ...]) -> Any:
        which, others = batched
        assert not any(jax.tree.leaves(others)), "the arguments are the same for all matrices"
        pairs = zip(matrices, which, strict=True)
        stacked = [one.behind(size) if mapped else one for one, mapped in pairs]
        return on_owners(function, cost, arrays, stacked, *args), which

    return run(list(arrays), args)


class _Slot(NamedTuple):
    """A place for a part of a matrix in what the ranks send each other.

    Attributes:
        kind: the class of the matrix.
        begins: where the part begins, for each owner.
        used: whether an owner has such a matrix.
    """

    kind: Divided
    begins: np.ndarray
    used: np.ndarray


def _run(
    function: Function,
    cost: Callable[[int, int], float],
    arrays: Sequence[jax.Array],
    matrices: Sequence[Matrices],
    args: tuple[Any, ...],
) -> list[jax.Array]:
    mesh = jax.sharding.get_abstract_mesh()
    members: dict[Divided, list[int]] = {}
    for number, (array, one) in enumerate(zip(arrays, matrices, strict=True)):
        members.setdefault(one.divided(mesh.axis_names, array.dtype), []).append(number)
    loads = [
        Load(sum(matrices[number].count for number in own), cost(*kind.matrix), kind.owners)
        for kind, own in members.items()
    ]
    rest = dict(zip(members, owners_of_rest(loads, dict(mesh.shape)), strict=True))

    def local(arrays: list[jax.Array], args: tuple[Any, ...]) -> list[jax.Array]:
        work = lambda given: function(given, *args)  # noqa: E731
        given = {
            kind: jnp.concatenate([matrices[n].flat(arrays[n]) for n in own]) for kind, own in members.items()
        }
        whole = {kind: len(given[kind]) - len(rest[kind]) for kind in members}
        found = {kind: [_in_batch(kind, parts[: whole[kind]], work)] for kind, parts in given.items() if whole[kind]}
        left = {kind: parts[whole[kind] :] for kind, parts in given.items() if rest[kind]}
        for kind, parts in _rest(left, rest, work).items():
            found.setdefault(kind, []).append(parts)
        results: list[Any] = [None for _ in arrays]
        for kind, own in members.items():
            ends = np.cumsum([matrices[n].count for n in own])[:-1]
            for n, parts in zip(own, jnp.split(jnp.concatenate(found[kind]), ends), strict=True):
                results[n] = matrices[n].unflat(parts)
        return results

    specs = [one.spec for one in matrices]
    mapped = jax.shard_map(local, in_specs=(specs, PartitionSpec()), out_specs=specs, check_vma=False)
    stored = [
        jnp.pad(array, [(0, to - size) for to, size in zip(one.stored, one.shape, strict=True)])
        for array, one in zip(arrays, matrices, strict=True)
    ]
    return [result[*map(slice, one.shape)] for result, one in zip(mapped(stored, args), matrices, strict=True)]


def _in_batch(kind: Divided, parts: jax.Array, work: Function) -> jax.Array:
    """Returns the parts of the results for matrices of which every rank owns equally many.

    Args:
        kind: the class of the matrices.
        parts: this rank's part of each matrix, `(matrices, size)`.
        work: the function.
    """
    ranks = degrees(kind.owners)

    def run(owned: jax.Array) -> jax.Array:
        return kind.parts(work(kind.joined(owned.reshape(len(owned), -1, kind.size)))).reshape(owned.shape)

    return _exchanged(parts.reshape(ranks, -1), kind.divides, kind.copies, run).reshape(parts.shape)


def _rest(
    parts: dict[Divided, jax.Array], owners: dict[Divided, list[int]], work: Function
) -> dict[Divided, jax.Array]:
    """Returns the parts of the results for matrices that are owned by some of the ranks.

    Args:
        parts: this rank's part of each matrix, `(matrices, size)`, by class.
        owners: the owner of each matrix, by class.
        work: the function.
    """
    found: dict[Divided, jax.Array] = {}
    together: dict[tuple[Any, ...], list[Divided]] = {}
    for kind in parts:
        together.setdefault((kind.divides, kind.copies, kind.dtype), []).append(kind)
    for (divides, copies, _), kinds in together.items():
        sent: list[list[jax.Array]] = [[] for _ in range(degrees(divides + copies))]
        places: dict[Divided, list[tuple[int, int]]] = {}
        slots: list[_Slot] = []
        for kind in kinds:
            begins: list[list[int]] = [[] for _ in sent]
            for owner, part in zip(owners[kind], parts[kind], strict=True):
                begin = sum(map(len, sent[owner]))
                places.setdefault(kind, []).append((owner, begin))
                begins[owner].append(begin)
                sent[owner].append(part)
            for number in range(max(map(len, begins))):
                own = [each[number] if number < len(each) else -1 for each in begins]
                slots.append(_Slot(kind, np.maximum(own, 0), np.array(own) >= 0))
        length = max(sum(map(len, own)) for own in sent)
        filled = [jnp.concatenate([*own, jnp.zeros(length - sum(map(len, own)), parts[kinds[0]].dtype)]) for own in sent]
        back = _exchanged(jnp.stack(filled), divides, copies, functools.partial(_in_slots, slots, divides + copies, work))
        for kind in kinds:
            found[kind] = jnp.stack([back[owner, begin : begin + kind.size] for owner, begin in places[kind]])
    return found


def _in_slots(slots: Sequence[_Slot], axes: tuple[str, ...], work: Function, owned: jax.Array) -> jax.Array:
    """Replaces the matrices that this rank owns by their results.

    Args:
        slots: where the matrices may be.
        axes: the mesh axes of the owners.
        work: the function.
        owned: the parts of the matrices, `(ranks, length)`.
    """
    rank = lax.axis_index(axes)
    for kind, begins, used in slots:

        def run(owned: jax.Array, begin: jax.Array, kind: Divided = kind) -> jax.Array:
            own = lax.dynamic_slice_in_dim(owned, begin, kind.size, 1)
            results = kind.parts(work(kind.joined(own[:, None])))[:, 0]
            return lax.dynamic_update_slice_in_dim(owned, results, begin, 1)

        begin = jnp.asarray(begins, jnp.int32)[rank]
        owned = lax.cond(jnp.asarray(used)[rank], run, lambda owned, _: owned, owned, begin)
    return owned


def _exchanged(
    sent: jax.Array, divides: tuple[str, ...], copies: tuple[str, ...], run: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Sends parts to their owners, runs a function there, and returns the parts of the results.

    Args:
        sent: what this rank sends to each owner, `(owners, length)`. Owners are ordered along `divides`, then `copies`.
        divides: the axes whose ranks have different parts.
        copies: the axes whose ranks have the same parts.
        run: the function; it gets what an owner received, `(ranks of divides, length)`, and returns as much.
    """
    if copies:
        each = sent.reshape(degrees(divides), degrees(copies), -1)
        sent = lax.dynamic_index_in_dim(each, lax.axis_index(copies), 1, keepdims=False)
    back = _all_to_all(run(_all_to_all(sent, divides)), divides)
    if copies:
        back = lax.all_gather(back, copies, axis=1).reshape(-1, back.shape[-1])
    return back


def _all_to_all(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True) if axes else x
