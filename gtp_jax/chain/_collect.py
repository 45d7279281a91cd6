"""Stacks, in the order of the layers, values that a pass may compute in any order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any

# The index of the layer, or of the first of several; the values; and whether they have a leading dimension over layers.
Piece = tuple[int, Tree, bool]


def collect(pieces: list[list[Piece]], stacked: list[bool]) -> list[Tree]:
    """Returns one pytree per stage. If the stage is stacked, the values of its layers are stacked in order.

    Args:
        pieces: the pieces of each stage, in any order; exactly one for a stage that is not stacked.
        stacked: for each stage, whether it is stacked.
    """
    return [_join(of_stage, many) for of_stage, many in zip(pieces, stacked, strict=True)]


def _join(pieces: list[Piece], stacked: bool) -> Tree:
    ordered = [(tree, many) for _, tree, many in sorted(pieces, key=lambda piece: piece[0])]
    if not stacked:
        return ordered[0][0]
    lifted = [tree if many else jax.tree.map(lambda a: a[None], tree) for tree, many in ordered]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *lifted)
