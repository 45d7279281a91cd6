"""Sends parts of matrices to their owners, and parts of the results back."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax

from ..mesh import degrees
from ._divided import Divided

Work = Callable[[jax.Array], jax.Array]


def exchanged(sent: jax.Array, divides: tuple[str, ...], copies: tuple[str, ...], run: Work) -> jax.Array:
    """Sends parts to their owners, runs a function there, and returns the parts of the results.

    Args:
        sent: what this rank has for each owner, `(owners, length)`. Owners are ordered along `divides`, then `copies`.
        divides: the mesh axes whose ranks have different parts.
        copies: the mesh axes whose ranks have the same parts.
        run: the function; it gets what an owner received, `(ranks of divides, length)`, and returns the same shape.
    """
    if copies:
        each = sent.reshape(degrees(divides), degrees(copies), -1)
        sent = lax.dynamic_index_in_dim(each, lax.axis_index(copies), 1, keepdims=False)
    back = _all_to_all(run(_all_to_all(sent, divides)), divides)
    return lax.all_gather(back, copies, axis=1).reshape(-1, back.shape[-1]) if copies else back


def in_batch(kind: Divided, parts: jax.Array, work: Work) -> jax.Array:
    """Returns the parts of the results for matrices of which every rank owns equally many.

    Args:
        kind: the class of the matrices.
        parts: this rank's part of each matrix, `(matrices, size)`.
        work: a function of matrices, `(count, rows, columns)`, that returns results of the same shape.
    """

    def run(owned: jax.Array) -> jax.Array:
        return kind.parts(work(kind.joined(owned.reshape(len(owned), -1, kind.size)))).reshape(owned.shape)

    sent = parts.reshape(degrees(kind.owners), -1)
    return exchanged(sent, kind.divides, kind.copies, run).reshape(parts.shape)


def _all_to_all(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True) if axes else x
