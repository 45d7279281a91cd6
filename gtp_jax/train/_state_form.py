"""Checks that a step keeps the shapes and dtypes of a model's variables other than parameters."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..mesh import with_paths

Tree = Any


def check_form_kept(before: Tree, after: Tree) -> None:
    """Refuses a call of a loss that adds or removes arrays in the model's variables, or changes the shape or dtype of
    one.

    Args:
        before: a nested dict of the values of the variables before the call.
        after: a nested dict of the values of the same variables after the call.

    Raises:
        ValueError: if there is such a change; the message gives the paths, shapes and dtypes of up to eight arrays.
    """
    had, has = _forms(before), _forms(after)
    changed = [path for path in {**had, **has} if had.get(path) != has.get(path)]
    if changed:
        lines = [f"  {path}: from {had.get(path, 'nothing')} to {has.get(path, 'nothing')}" for path in changed[:8]]
        raise ValueError(
            "a loss, or a call in it, changes the form of the model's variables:\n"
            + "\n".join(lines)
            + "\nA step must return a state of the form that it was given. Create the variable with its final shape "
            "and dtype, such as `nnx.Variable(jnp.zeros(shape, dtype))`, and keep both when it is written; remove what "
            "an earlier call has sown with `nnx.pop(model, nnx.Intermediate)`."
        )


def _forms(tree: Tree) -> dict[str, str]:
    leaves = with_paths(tree, is_leaf=lambda leaf: leaf is None)
    return {".".join(path): "None" if leaf is None else form(leaf) for path, leaf in leaves}


def form(leaf: Any) -> str:
    """Returns the dtype and the shape of an array in the form that messages use, such as `float32[2, 3]`."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return f"{dtype}{list(jnp.shape(leaf))}"
