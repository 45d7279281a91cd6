"""Calls loss functions and checks what they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ..hook import float_ids_explained, ids_refused_by
from ..nn import Embed
from ._rows import numbers_in_lists

Tree = Any
Loss = Callable[[Any, Tree], Any]


class Returned(NamedTuple):
    """The result of a loss function, in parts.

    Attributes:
        total: the scalar that is differentiated: a mean, or a sum over tokens.
        tokens: the number of tokens if `total` is a sum; `None` if it is a mean.
        aux: a pytree of arrays; `()` if there is none.
    """

    total: jax.Array
    tokens: jax.Array | None
    aux: Tree


def check_loss(loss: Any) -> None:
    """Refuses a loss that is not callable.

    Raises:
        TypeError: if it is not callable; the message names its type.
    """
    if not callable(loss):
        raise TypeError(
            f"`loss` is a {type(loss).__name__}, which cannot be called; it must be a function of the model and the "
            "batch, such as `gtp_jax.models.next_token_loss`. Did you pass another argument in its place?"
        )


def evaluate(loss: Loss, model: Any, batch: Tree, *, has_aux: bool) -> Returned:
    """Calls a loss function and checks its result.

    A loss is a floating-point scalar, or a pair of scalars (sum of token losses, number of tokens). With `has_aux` the
    function returns a pair (loss, aux), where `aux` is a pytree of arrays and numbers.

    Raises:
        TypeError: if the function returns anything else. Errors of the function itself pass through, some with a note.
    """
    returned, aux = _called(loss, model, batch), ()
    if has_aux:
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                "with `has_aux=True`, `loss` must return a pair (loss, aux), where `loss` is a scalar or (sum of token "
                f"losses, number of tokens); it returned {_described(returned)}."
            )
        returned, aux = returned
    if isinstance(returned, tuple) and len(returned) == 2 and all(map(_is_scalar, returned)):
        return Returned(wide(_float(returned[0])), wide(jnp.asarray(returned[1])), _arrays(aux))
    if not _is_scalar(returned):
        raise TypeError(
            "`loss` must return a scalar, such as a mean; or two scalars, (sum of token losses, number of tokens), "
            "such as `gtp_jax.cross_entropy(logits, targets)`, whose quotient a step takes over the whole batch. "
            f"It returned {_described(returned)}. If it returns more than its loss, pass `has_aux=True`."
        )
    return Returned(wide(_float(returned)), None, _arrays(aux))


def _is_scalar(returned: Any) -> bool:
    if returned is None or not jax.tree_util.treedef_is_leaf(jax.tree.structure(returned)):
        return False
    return jnp.shape(returned) == ()


def _called(loss: Loss, model: Any, batch: Tree) -> Any:
    try:
        return loss(model, batch)
    except Exception as error:
        if found := ids_refused_by(error, (nnx.Embed, Embed)):
            message = f"{float_ids_explained(error) or error} {_leaves_like(found[1], batch)}"
            raise (TypeError if isinstance(error, TypeError) else ValueError)(message) from error
        if isinstance(error, TypeError) and "not callable" in str(error):
            error.add_note("A loss is called as `loss(model, batch)`: the model is its first argument.")
        if listed := numbers_in_lists(batch):
            error.add_note(listed)
        raise


def _leaves_like(array: Any, batch: Tree) -> str:
    """Returns a sentence that names the leaves of a batch from which an array may come: of those with its dtype, those
    with its shape, otherwise those with its number of dimensions, otherwise all."""
    leaves = [
        (f"`batch`{jax.tree_util.keystr(path)}", leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        if getattr(leaf, "dtype", None) == array.dtype
    ]
    shaped = [name for name, leaf in leaves if leaf.shape == array.shape]
    ranked = [name for name, leaf in leaves if leaf.ndim == array.ndim]
    names = shaped or ranked or [name for name, _ in leaves]
    if not names:
        return f"No array of the batch is {array.dtype}: the loss or the model makes this one."
    return f"Of the batch, {' and '.join(names)} {'is' if len(names) == 1 else 'are'} {array.dtype}."


def _arrays(aux: Tree) -> Tree:
    """Converts the leaves of `aux` to arrays. Integers get at least int32, because they are summed over microbatches.

    Raises:
        TypeError: if a leaf cannot become an array; the message names the leaf.
    """

    def array(path: Any, leaf: Any) -> jax.Array:
        try:
            value = jnp.asarray(leaf)
            return wide(value) if jnp.issubdtype(value.dtype, jnp.integer) else value
        except TypeError:
            raise TypeError(
                f"`aux`{jax.tree_util.keystr(path)}, which `loss` returned, is a {type(leaf).__name__}; it must be an "
                "array or a number. Leave text out of `aux`."
            ) from None

    return jax.tree_util.tree_map_with_path(array, aux)


def mean(total: jax.Array, tokens: jax.Array | None) -> jax.Array:
    """Returns `total / tokens`. Returns `total` unchanged if `tokens` is `None`, because `total` is then already a
    mean, or if `tokens` is 0, because the sum over no tokens is 0.

    So the loss and the gradients of a fully masked batch are 0, not NaN. Parameters then move only by what the
    optimizer adds, such as weight decay or momentum.

    Returns NaN if `tokens` is NaN or negative, as after an overflow, so that a step is skipped like any other that is
    not finite.
    """
    if tokens is None:
        return total
    return (total / jnp.where(tokens > 0, tokens, jnp.where(tokens == 0, 1, jnp.nan))).astype(total.dtype)


def wide(value: jax.Array) -> jax.Array:
    """Casts floats to at least float32 and integers to at least int32, so that many of them can be added. Returns
    other arrays unchanged."""
    if jnp.issubdtype(value.dtype, jnp.floating) and jnp.finfo(value.dtype).bits < 32:
        return value.astype(jnp.float32)
    if jnp.issubdtype(value.dtype, jnp.integer) and value.dtype.itemsize < 4:
        return value.astype(jnp.int32)
    return value


def _float(value: Any) -> jax.Array:
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"`loss` returns {value.dtype}; a step differentiates it, so it must be a real floating-point number."
        )
    return value


def _described(returned: Any) -> str:
    """Returns what was returned, as a noun."""
    if returned is None:
        return "None, as without a `return`"
    if isinstance(returned, jax.Array):
        return f"an array of shape {returned.shape}"
    return f"a {type(returned).__name__} of shapes {jax.tree.map(jnp.shape, returned)}"
