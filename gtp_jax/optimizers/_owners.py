"""Runs a function of whole matrices on one owner rank for each matrix.

[Note: owners] The ranks have parts of every matrix. Each class of matrices (of one shape, divided by the same axes) is
exchanged by an all-to-all over the axes that divide it: a rank sends its parts of the matrices that another rank owns,
and gets all parts of those that it owns itself. The results return in the same way. With R owners, a rank sends
(R - 1) / R of the size of its own parts each way; to gather every matrix on every rank, R - 1 times their size.

Equally many matrices of a class are owned by each rank, in one batch. What is left of all classes, up to R - 1 matrices
of each, is shared by cost (`owners_of_rest`), and exchanged together; a rank runs the function only for its own. The
alternative is to divide the work of each of these: with the columns of an m x n matrix divided, every Newton-Schulz
iteration reduce-scatters one m x m matrix and gathers two. In five iterations a rank sends 15 m^2 elements for each
matrix; in an exchange, 2 m n / R.

Where ranks have copies of a part, as the replicas of dp without ZeRO do, they share the matrices too, and gather the
results. A gathered element is 4 bytes; iterating it takes 20 m to 30 m operations. At 400 TFLOP/s these take longer
than the gather from m = 200 on over NVLink (450 GB/s), and from m = 1600 on over a network of 50 GB/s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from ._divided import Divided
from ._exchange import in_batch
from ._matrices import Matrices
from ._shares import Load, owners_of_rest
from ._slots import in_slots

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
        arrays: the arrays that hold the matrices. Those without elements are returned as they are: XLA's compiler for
            CPUs crashes on some programs with them (jaxlib 0.11.2).
        matrices: what each array holds.
        args: arrays that are the same for all matrices.
    """

    results, filled = list(arrays), [n for n, array in enumerate(arrays) if array.size]
    matrices = [matrices[n] for n in filled]
    if not filled:
        return results

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

    for n, result in zip(filled, run([arrays[n] for n in filled], args), strict=True):
        results[n] = result
    return results


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
        given = {kind: jnp.concatenate([matrices[n].flat(arrays[n]) for n in own]) for kind, own in members.items()}
        whole = {kind: len(given[kind]) - len(rest[kind]) for kind in members}
        found = {kind: [in_batch(kind, parts[: whole[kind]], work)] for kind, parts in given.items() if whole[kind]}
        left = {kind: parts[whole[kind] :] for kind, parts in given.items() if rest[kind]}
        for kind, parts in in_slots(left, rest, work).items():
            found.setdefault(kind, []).append(parts)
        results = list(arrays)
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
