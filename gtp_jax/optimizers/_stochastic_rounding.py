"""Updates bfloat16 parameters in float32, and rounds them stochastically."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..mesh import with_paths
from ._rounding import rounded, step_key

Tree = Any


class StochasticRoundingState(NamedTuple):
    """The state of `stochastic_rounding`.

    Attributes:
        step: the number of updates made, int32.
        inner_state: the state of the wrapped optimizer.
    """

    step: jax.Array
    inner_state: Any


def stochastic_rounding(
    optimizer: optax.GradientTransformation, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer, so that bfloat16 parameters need no float32 masters.

    The optimizer computes in float32. The sum of a parameter and its update is rounded stochastically, so small updates
    are not lost on average. `optax.apply_updates` then gives exactly the rounded numbers. Exceptions are differences
    below 2**-126, which devices may flush to zero, and parameters that are infinite, which become NaN. Wrap last: a
    transformation outside this one would change the rounded numbers.

    Args:
        optimizer: any optax optimizer.
        seed: the seed of stochastic rounding.

    Raises:
        TypeError: by `init` and `update`, if a parameter is not bfloat16.
        ValueError: by `update`, if it is called without the parameters.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> Any:
        return StochasticRoundingState(jnp.zeros((), jnp.int32), inner.init(_in_float32(params)))

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        if params is None:
            raise ValueError(
                "`stochastic_rounding` rounds the sum of parameters and updates, but `params` is None. Call "
                "`update(gradients, state, params)`."
            )
        old = _in_float32(params)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        changes, own = inner.update(grads, state.inner_state, old, **extra)
        key = step_key(seed, state.step)
        new = [
            rounded(p + u, key, path) for (path, p), u in zip(with_paths(old), jax.tree.leaves(changes), strict=True)
        ]
        # A float32 sum of the old number and this difference, rounded to bfloat16, is the new number.
        moved: Any = [q.astype(jnp.float32) - p for q, p in zip(new, jax.tree.leaves(old), strict=True)]
        moved = jax.tree.unflatten(jax.tree.structure(old), moved)
        step: Any = optax.safe_increment(state.step)
        return moved, StochasticRoundingState(step, own)

    return optax.GradientTransformationExtraArgs(init, update)


def _in_float32(params: Tree) -> Tree:
    for path, param in with_paths(params):
        if param.dtype != jnp.bfloat16:
            raise TypeError(
                f"the parameter {'.'.join(path)!r} is {param.dtype}; `stochastic_rounding` takes only bfloat16 "
                "parameters. Create the model with bfloat16 parameters, or use the optimizer by itself."
            )
    return jax.tree.map(lambda p: p.astype(jnp.float32), params)
