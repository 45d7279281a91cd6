"""Tells the count of a loss, such as its number of tokens, from a metric in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ..mesh import with_paths
from ._most import most_of
from ._needs import DECLARED, needs_of

Tree = Any


def as_count(number: Any) -> jax.Array:
    """Declares that a number is the count of a loss which returns (sum, count), although it depends on parameters.

    A step refuses a count that depends on parameters, because it would not tell it from a metric, such as an accuracy.
    Use this function for a count that does, such as that of the tokens which a router kept.

    Args:
        number: a scalar. No gradient passes through it.

    Returns:
        The number.
    """
    return checkpoint_name(lax.stop_gradient(jnp.asarray(number)), DECLARED)


def refuse_metric(
    closed: Any, count: int | None, params: Tree, variables: tuple[Tree, Tree], made: Sequence[Any] = ()
) -> None:
    """Refuses a loss whose count depends on parameters, unless `as_count` declares it.

    Another variable of the model counts as a parameter if what the loss leaves in it depends on one: it then holds, in
    a later step, what depends on the parameters of this one. Frozen weights are constants.

    Args:
        closed: the closed jaxpr of the loss, or of its gradient.
        count: the number of the output that is the count; `None` if the loss returns a mean.
        params: a pytree of the numbers of the inputs that are parameters.
        variables: pytrees of the numbers of the inputs that hold the model's other variables, and of the outputs.
        made: parameters, and what was made of them, such as codes, over which the jaxpr may close.

    Raises:
        TypeError: if the count depends on a parameter; the message says what to return instead.
    """
    if count is None:
        return
    before, after = (dict(with_paths(tree)) for tree in variables)
    kept = {number: after[path] for path, number in before.items() if path in after}
    needs = needs_of(closed, [count], kept)
    if needs.inputs.isdisjoint(jax.tree.leaves(params)) and not any(id(array) in needs.constants for array in made):
        return
    dtype = getattr(closed, "jaxpr", closed).outvars[count].aval.dtype
    raise TypeError(
        f"`loss` returns two scalars, of which a step uses the second, {dtype}, as the count, such as the number of "
        "tokens, by which it divides the first; but the second depends on parameters of the model, as an accuracy "
        "does. If it is something to report, return (loss, aux) and pass `has_aux=True`. If it is the count, return "
        "`gtp_jax.train.as_count(number)` in its place; or return the quotient as one scalar."
    )


def refuse_examples(closed: Any, count: int | None, routed: Sequence[tuple[int, int]], ranks: int) -> None:
    """Refuses a loss whose count is one of examples, if experts add sums over tokens to its gradient.

    A step divides the gradient by the count, so these sums would be too large by the number of an example's tokens.

    Args:
        closed: the closed jaxpr of the gradient of the loss.
        count: the number of the output that is the count; `None` if the loss returns a mean.
        routed: for each call of a `MoE`, the examples of a rank, and the tokens of an example.
        ranks: the number of ranks over whose examples the count is summed.

    Raises:
        ValueError: if the count is at most one for each example, whatever the batch, and each has three tokens or more.
    """
    if count is None or not routed:
        return
    examples, tokens = min(routed)
    if tokens > 2 and (most := most_of(closed, count)) <= examples * ranks:
        raise ValueError(
            f"`loss` returns (sum, count) with a count of at most {most:g}, no more than one for each example, but "
            f"experts route {examples * ranks} examples of {tokens} tokens, and add terms to the gradient that are "
            f"sums over tokens: divided by this count, they would be at least {tokens} times too large. Return the "
            "mean as one scalar, and build each MoE with `loss_reduction='mean'`, or with `aux_loss_coeff` and "
            "`routing.z_loss_coeff` of 0. If the count is one of tokens, return `gtp_jax.train.as_count(number)`."
        )
