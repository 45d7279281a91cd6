"""Gradients as backward finds them, layer by layer and out of order, put back into stacks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any

# Index of the (first) layer, the gradient, and whether it carries a leading dimension of several layers.
Piece = tuple[int, Tree, bool]


class Gradients:
    """The pieces found so far, a list for each link.

    Attributes:
        slices: of the weights that are cut.
        whole: of the parameters that are not.
    """

    def __init__(self, links: int):
        self.slices: list[list[Piece]] = [[] for _ in range(links)]
        self.whole: list[list[Piece]] = [[] for _ in range(links)]


def collect(pieces: list[list[Piece]], stacked: list[bool]) -> list[Tree]:
    """One gradient a link, its layers in order, with the leading dimension where the link is stacked."""
    return [_join(found, many) for found, many in zip(pieces, stacked, strict=True)]


def _join(found: list[Piece], stacked: bool) -> Tree:
    ordered = [(tree, many) for _, tree, many in sorted(found, key=lambda piece: piece[0])]
    if not stacked:
        return ordered[0][0]
    lifted = [tree if many else jax.tree.map(lambda a: a[None], tree) for tree, many in ordered]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *lifted)
