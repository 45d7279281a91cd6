"""What a loss function returns, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._rows import numbers_in_lists

Tree = Any
Loss = Callable[[Any, Tree], Any]


class Returned(NamedTuple):
    """The parts of what a loss function returned.

    Attributes:
        total: a scalar, which is differentiated: a mean, or a sum over tokens.
        tokens: their number, if `total` is a sum; `None` of a mean.
        aux: a pytree of arrays; `()` if there is none.
    """

    total: jax.Array
    tokens: jax.Array | None
    aux: Tree


def check_loss(loss: Any) -> None:
    """Refuses what is no function.

    Raises:
        TypeError: saying what came.
    """
    if not callable(loss):
        raise TypeError(
            f"`loss` is a {type(loss).__name__}, which cannot be called; it must be a function of the model and the "
            "batch, such as `gtp_jax.models.next_token_loss`. Is another argument in its place?"
        )


def evaluate(loss: Loss, model: Any, batch: Tree, *, has_aux: bool) -> Returned:
    """Calls a loss function.

    Raises:
        TypeError: if it returns anything but a scalar, or a sum and a number; with `has_aux` a pair of this and a
            pytree of arrays of numbers; where it is differentiated, if the number has a gradient.
    """
    returned, aux = _called(loss, model, batch), ()
    if has_aux:
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                "with `has_aux=True`, `loss` returns a pair (loss, aux), of which `loss` is a scalar or (sum of token "
                f"losses, number of tokens); it returned {_described(returned)}."
            )
        returned, aux = returned
    if isinstance(returned, tuple) and len(returned) == 2 and all(jnp.shape(v) == () for v in returned):
        number = wide(_number(jnp.asarray(returned[1])))
        return Returned(wide(_float(returned[0])), number, _arrays(aux))
    whole: Any = returned
    if not jax.tree_util.treedef_is_leaf(jax.tree.structure(whole)) or jnp.shape(whole) != ():
        raise TypeError(
            "`loss` returns a scalar, such as a mean; or (sum of token losses, number of tokens), two scalars, of "
            "which a step takes the quotient over the whole batch, as `gtp_jax.cross_entropy(logits, targets)` gives "
            f"them. It returned {_described(returned)}. If it returns more beside its loss, pass `has_aux=True`."
        )
    return Returned(wide(_float(returned)), None, _arrays(aux))


def _called(loss: Loss, model: Any, batch: Tree) -> Any:
    try:
        return loss(model, batch)
    except Exception as error:
        if isinstance(error, TypeError) and "not callable" in str(error):
            error.add_note("A loss is called as `loss(model, batch)`: the model is its first argument.")
        if listed := numbers_in_lists(batch):
            error.add_note(listed)
        raise


def _arrays(aux: Tree) -> Tree:
    """Returns a pytree of arrays, integers in int32 at least, in which microbatches add them up; refuses by name what
    cannot be an array."""

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


def refuse_number_with_gradient(total: Callable[[Tree], jax.Array], params: Tree) -> None:
    """Refuses, ahead of an evaluation, a number of tokens that has a gradient, as a step does: neither is a number.

    Args:
        total: the loss's first scalar, as a function of the parameters; it is traced and not run.
        params: of the model.

    Raises:
        TypeError: saying what to write instead.
    """
    try:
        jax.eval_shape(jax.grad(total), params)
    except NumberHasGradient:
        raise
    except Exception:  # what is only evaluated need not have a gradient
        return


def mean(total: jax.Array, tokens: jax.Array | None) -> jax.Array:
    """Returns `total` divided by `tokens`, and 0 of no tokens; `total` itself if it is a mean already.

    The gradients of a batch that is masked throughout are 0: parameters move only by what the optimizer does of its
    own, such as weight decay or momentum.
    """
    return total if tokens is None else (total / jnp.where(tokens > 0, tokens, 1)).astype(total.dtype)


def wide(value: jax.Array) -> jax.Array:
    """Returns a number in a dtype in which many may be added up: float32 at least, int32 at least."""
    if jnp.issubdtype(value.dtype, jnp.floating) and jnp.finfo(value.dtype).bits < 32:
        return value.astype(jnp.float32)
    if jnp.issubdtype(value.dtype, jnp.integer) and value.dtype.itemsize < 4:
        return value.astype(jnp.int32)
    return value


def _float(value: Any) -> jax.Array:
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"`loss` returns {value.dtype}, which has no gradient; it must be a real floating-point number."
        )
    return value


class NumberHasGradient(TypeError):
    """A loss returned something else than a number of tokens."""


@jax.custom_vjp
def _number(tokens: jax.Array) -> jax.Array:
    """Returns a number of tokens; an error if it has a gradient, which the quotient that a step takes leaves out."""
    return tokens


def _fwd(tokens: jax.Array) -> Any:
    raise NumberHasGradient(
        f"`loss` returns two scalars, of which a step takes the second, {tokens.dtype}, for the number of tokens; but "
        "JAX takes it to have a gradient with respect to the parameters. If it is something to report, pass "
        "`has_aux=True`, for (loss, aux). If it is the number, return `jax.lax.stop_gradient(number)`, or the quotient "
        "as one scalar."
    )


_number.defvjp(_fwd, lambda _, gradient: (gradient,))


def _described(returned: Any) -> str:
    return f"{type(returned).__name__} of shapes {jax.tree.map(jnp.shape, returned)}"
