"""What a loss function returns, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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


def evaluate(loss: Loss, model: Any, batch: Tree, *, has_aux: bool) -> Returned:
    """Calls a loss function.

    Raises:
        TypeError: if it returns anything but a scalar, or a sum and a number; with `has_aux` a pair of this and a
            pytree of arrays; where it is differentiated, if the number has a gradient.
    """
    returned, aux = loss(model, batch), ()
    if has_aux:
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                "with `has_aux=True`, `loss` returns a pair (loss, aux), of which `loss` is a scalar or (sum of token "
                f"losses, number of tokens); it returned {_described(returned)}."
            )
        returned, aux = returned
    if isinstance(returned, tuple) and len(returned) == 2 and all(jnp.shape(v) == () for v in returned):
        return Returned(_float(returned[0]), _number(jnp.asarray(returned[1])), jax.tree.map(jnp.asarray, aux))
    if isinstance(returned, tuple) or jnp.shape(returned) != ():
        raise TypeError(
            "`loss` returns a scalar, such as a mean; or (sum of token losses, number of tokens), two scalars, of "
            "which a step takes the quotient over the whole batch, as `gtp_jax.cross_entropy(logits, targets)` gives "
            f"them. It returned {_described(returned)}. If it returns more beside its loss, pass `has_aux=True`."
        )
    return Returned(_float(returned), None, jax.tree.map(jnp.asarray, aux))


def mean(total: jax.Array, tokens: jax.Array | None) -> jax.Array:
    """Returns `total` a token, 0 of no tokens: a batch that is masked throughout changes nothing but the optimizer's
    state; `total` itself if it is a mean."""
    return total if tokens is None else (total / jnp.where(tokens > 0, tokens, 1)).astype(total.dtype)


def _float(value: Any) -> jax.Array:
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"`loss` returns {value.dtype}, which has no gradient; it must be a real floating-point number."
        )
    return value


@jax.custom_vjp
def _number(tokens: jax.Array) -> jax.Array:
    """Returns a number of tokens; an error if it has a gradient, which the quotient that a step takes leaves out."""
    return tokens


def _fwd(tokens: jax.Array) -> Any:
    raise TypeError(
        f"`loss` returns two scalars, of which a step takes the second, {tokens.dtype}, for the number of tokens; but "
        "it has a gradient with respect to the parameters. If it is something to report, pass `has_aux=True`, for "
        "(loss, aux). If it is the number, return `jax.lax.stop_gradient(number)`, or the quotient as one scalar."
    )


_number.defvjp(_fwd, lambda _, gradient: (gradient,))


def _described(returned: Any) -> str:
    return f"{type(returned).__name__} of shapes {jax.tree.map(jnp.shape, returned)}"
