"""Checks the arrays of a batch: that none is empty, that none is a list of numbers, and that all have the same number
of rows."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .._foreign import brief

Tree = Any


def check_numbers(batch: Tree) -> None:
    """Refuses a batch with a leaf that is neither an array of numbers nor a number, such as text.

    Raises:
        TypeError: if there is such a leaf; the message names the first.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not _is_numeric(leaf):
            array = isinstance(leaf, np.ndarray | np.generic)
            kind = f"an array of {leaf.dtype}" if array else f"a {type(leaf).__name__}, {brief(leaf)}"
            raise TypeError(
                f"`batch`{jax.tree_util.keystr(path)} is {kind}; a step computes with arrays of numbers. Leave it out "
                "of the batch that you pass to the step, or encode it before: text as token ids, labels as integers."
            )


def _is_numeric(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSUMm"
    return isinstance(leaf, int | float | complex) or hasattr(leaf, "dtype") or hasattr(leaf, "__jax_array__")


def check_filled(batch: Tree) -> None:
    """Refuses a batch with an empty array (no rows, or rows without tokens), because a mean over it would be NaN; and
    one with a leaf that `check_numbers` refuses.

    Raises:
        TypeError: if a leaf is no number and no array of numbers; the message names it.
        ValueError: if an array has no elements; the message names the first.
    """
    check_numbers(batch)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if 0 in np.shape(leaf):
            raise ValueError(
                f"`batch`{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}, so it has no elements. Leave out "
                "batches without rows. To leave rows out of the loss, pass `weights` of 0 for them."
            )


def check_rows(batch: Tree, cut: str = "that is divided into microbatches or among ranks") -> None:
    """Refuses a batch whose arrays have different numbers of rows, because it cannot be split by examples.

    Args:
        batch: a pytree of arrays. Scalars are ignored.
        cut: a clause for the message that says how the batch is split.

    Raises:
        ValueError: if the first dimensions differ; the message gives them all.
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
            f"the leaves of a batch {cut} must all have one row for each example: {sizes}. Let the loss close over "
            f"what all examples share, such as class weights, or repeat it for each example.{reshape}"
        )


def check_parts(batch: Tree, parts: int, of: str) -> None:
    """Refuses a batch with an array whose first dimension cannot be divided into equal parts.

    Args:
        batch: a pytree of arrays.
        parts: the number of parts.
        of: their names in the message, such as `microbatches`.

    Raises:
        ValueError: if there is such an array, or a scalar; the message names the first.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if np.ndim(leaf) == 0 or np.shape(leaf)[0] % parts:
            raise ValueError(
                f"`batch`{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}; its first dimension is the batch and "
                f"must be a multiple of {of} = {parts}."
            )


def check_arrays(batch: Tree) -> None:
    """Refuses a batch that contains a list of numbers, because JAX treats each number as a scalar without rows.

    Raises:
        ValueError: if there is such a list; the message names the first.
    """
    if listed := numbers_in_lists(batch):
        raise ValueError(listed)


def numbers_in_lists(batch: Tree) -> str:
    """Returns a message that names the first list of numbers in a batch and says what to pass instead; an empty string
    if there is no such list."""

    def is_list(node: Any) -> bool:
        leaves = jax.tree.leaves(node) if isinstance(node, list) else []
        return bool(leaves) and not any(map(np.ndim, leaves))

    for path, node in jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_list):
        if is_list(node):
            name = f"batch{jax.tree_util.keystr(path)}"
            return (
                f"`{name}` is a list of numbers, which JAX treats as a pytree of {len(jax.tree.leaves(node))} scalars, "
                f"not as an array. Pass `jnp.asarray({name})`."
            )
    return ""
