"""An optimizer that keeps an exponential moving average of the parameters."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ...models import AveragedState

Tree = Any


def averaged(
    optimizer: optax.GradientTransformation, decay: float, moved: Tree
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that also keeps an exponential moving average of the parameters after each update.

    Each further update multiplies the weights of the earlier ones by `decay`. The weights add up to 1: after the first
    update, the average equals the parameters, and their initial values do not count.

    Args:
        optimizer: the optimizer of the parameters. Its updates must be applied unchanged: clip gradients inside it, not
            around the returned optimizer.
        decay: the decay of the average, between 0 and 1.
        moved: a tree of bools: whether the optimizer updates each parameter. Parameters with their own update rules
            are not averaged.
    """
    inner = optax.with_extra_args_support(optimizer)

    def of_moved(function: Any, *trees: Tree) -> Tree:
        return jax.tree.map(lambda own, *leaves: function(*leaves) if own else optax.MaskedNode(), moved, *trees)

    def init(params: Tree) -> AveragedState:
        average = of_moved(lambda p: jnp.array(p, _dtype(p), copy=True), params)
        return AveragedState(jnp.zeros((), jnp.int32), average, inner.init(params))

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        steps: Any = optax.safe_increment(state.steps)
        # the denominator is 1 - decay ** steps, by expm1, because the subtraction cancels in float32 for a decay near 1
        share = (1 - decay) / -jnp.expm1(steps.astype(jnp.float32) * (math.log(decay) if decay else -math.inf))

        def one(new: jax.Array, average: jax.Array) -> jax.Array:
            return average + share.astype(average.dtype) * (new.astype(average.dtype) - average)

        average = of_moved(one, optax.apply_updates(params, updates), state.average)
        return updates, AveragedState(steps, average, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _dtype(parameter: Any) -> Any:
    return jnp.promote_types(parameter.dtype, jnp.float32)
