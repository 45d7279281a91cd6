"""Exchanges matrices of several classes together, of which each rank owns others."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..mesh import degrees
from ._divided import Divided
from ._exchange import Work, exchanged


class _Slot(NamedTuple):
    """A place for a part of a matrix in what the ranks send each other.

    Attributes:
        kind: the class of the matrix.
        begins: for each owner, where the part begins; -1 if the owner has no matrix there.
    """

    kind: Divided
    begins: np.ndarray


def in_slots(
    parts: Mapping[Divided, jax.Array], owners: Mapping[Divided, Sequence[int]], work: Work
) -> dict[Divided, jax.Array]:
    """Returns the parts of the results for matrices, each of which has an owner of its own.

    Args:
        parts: this rank's part of each matrix, `(matrices, size)`, by class.
        owners: the owner of each matrix, by class.
        work: a function of matrices, `(count, rows, columns)`, that returns results of the same shape.
    """
    found: dict[Divided, jax.Array] = {}
    together: dict[tuple[object, ...], list[Divided]] = {}
    for kind in parts:
        together.setdefault((kind.divides, kind.copies, kind.dtype), []).append(kind)
    for kinds in together.values():
        axes, dtype = kinds[0].owners, parts[kinds[0]].dtype
        sent: list[list[jax.Array]] = [[] for _ in range(degrees(axes))]
        lengths = [0 for _ in sent]
        places: dict[Divided, list[tuple[int, int]]] = {}
        for kind in kinds:
            places[kind] = []
            for owner, part in zip(owners[kind], parts[kind], strict=True):
                places[kind].append((owner, lengths[owner]))
                sent[owner].append(part)
                lengths[owner] += kind.size
        filled = [
            jnp.concatenate([*own, jnp.zeros(max(lengths) - length, dtype)])
            for own, length in zip(sent, lengths, strict=True)
        ]
        slots = [slot for kind in kinds for slot in _slots(kind, places[kind], len(sent))]
        run = functools.partial(_run, slots, axes, work)
        back = exchanged(jnp.stack(filled), kinds[0].divides, kinds[0].copies, run)
        for kind in kinds:
            found[kind] = jnp.stack([back[owner, begin : begin + kind.size] for owner, begin in places[kind]])
    return found


def _slots(kind: Divided, places: Sequence[tuple[int, int]], ranks: int) -> list[_Slot]:
    """Returns the slots of a class. Their number is the largest number of its matrices that one rank owns.

    Args:
        kind: the class.
        places: for each matrix, its owner, and where its part begins in what the owner gets.
        ranks: the number of owners.
    """
    begins = [[begin for owner, begin in places if owner == rank] for rank in range(ranks)]
    count = max(map(len, begins))
    table = np.array([own + [-1] * (count - len(own)) for own in begins])
    return [_Slot(kind, table[:, number]) for number in range(count)]


def _run(slots: Sequence[_Slot], axes: tuple[str, ...], work: Work, owned: jax.Array) -> jax.Array:
    """Replaces the matrices that this rank owns by their results, and computes no others.

    Args:
        slots: where the matrices are.
        axes: the mesh axes of the owners.
        work: the function of matrices.
        owned: the parts of the matrices, `(ranks, length)`.
    """

    def replaced(kind: Divided, owned: jax.Array, begin: jax.Array) -> jax.Array:
        own = lax.dynamic_slice_in_dim(owned, begin, kind.size, 1)
        results = kind.parts(work(kind.joined(own[:, None])))[:, 0]
        return lax.dynamic_update_slice_in_dim(owned, results, begin, 1)

    rank = lax.axis_index(axes)
    for kind, begins in slots:
        begin = jnp.asarray(begins)[rank]
        owned = lax.cond(begin >= 0, functools.partial(replaced, kind), lambda owned, _: owned, owned, begin)
    return owned
