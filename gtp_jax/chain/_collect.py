"""Stacks the values that a pass computes layer by layer, in any order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any

# The index of the (first) layer, the values, and whether they have a leading dimension for several layers.
Piece = tuple[int, Tree, bool]


def collect(pieces: list[list[Piece]], stacked: list[bool]) -> list[Tree]:
    """Returns one pytree per stage, with its layers in order and, if the stage is stacked, with a leading dimension."""
    return [_join(of_stage, many) for of_stage, many in zip(pieces, stacked, strict=True)]


def _join(pieces: list[Piece], stacked: bool) -> Tree:
    ordered = [(tree, many) for _, tree, many in sorted(pieces, key=lambda piece: piece[0])]
    if not stacked:
        return ordered[0][0]
    lifted = [tree if many else jax.tree.map(lambda a: a[None], tree) for tree, many in ordered]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *lifted)
