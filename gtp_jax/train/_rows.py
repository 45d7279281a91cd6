"""The rows of a batch: one for each example, in every leaf."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

Tree = Any


def check_filled(batch: Tree) -> None:
    """Refuses a batch of no rows, or of rows without tokens, whose mean loss is not a number."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if 0 in np.shape(leaf):
            raise ValueError(
                f"`batch`{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}, and so holds nothing. Leave out "
                "batches without rows; a row that does not count has `weights` of 0."
            )


def check_rows(batch: Tree, cut: str = "that is divided into microbatches or among ranks") -> None:
    """Refuses a batch that is to be cut into parts and has a leaf whose first dimension does not count its examples.

    Args:
        batch: a pytree of arrays.
        cut: how it is cut.
    """
    rows = {
        jax.tree_util.keystr(path): np.shape(leaf)[0]
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        if np.ndim(leaf)
    }
    if len(set(rows.values())) > 1:
        fewest = min(rows.values())
        sizes = ", ".join(f"`batch`{path} has {count}" for path, count in rows.items())
        several = [
            f"`batch`{path} to `({fewest}, {count // fewest}, ...)`"
            for path, count in rows.items()
            if count > fewest and count % fewest == 0
        ]
        reshape = f" If an example has several rows, reshape {', '.join(several)}." if several else ""
        raise ValueError(
            f"the leaves of a batch {cut} must have equally many rows, one for each example: {sizes}. Let the loss "
            f"close over what all examples share, such as weights of classes, or repeat it for each example.{reshape}"
        )


def check_arrays(batch: Tree) -> None:
    """Refuses lists of numbers in a batch that is to be cut into parts: they have no rows."""
    if listed := numbers_in_lists(batch):
        raise ValueError(listed)


def numbers_in_lists(batch: Tree) -> str:
    """Returns a message that names a list of numbers in a batch, and what to pass instead; empty if there is none."""

    def is_list(node: Any) -> bool:
        leaves = jax.tree.leaves(node) if isinstance(node, list) else []
        return bool(leaves) and not any(map(np.ndim, leaves))

    for path, node in jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_list):
        if is_list(node):
            name = f"batch{jax.tree_util.keystr(path)}"
            return (
                f"`{name}` is a list of numbers, which JAX takes for a pytree of {len(jax.tree.leaves(node))} scalars, "
                f"and not for an array. Pass `jnp.asarray({name})`."
            )
    return ""
