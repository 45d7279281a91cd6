"""Keeps the moments of an optimizer in bfloat16."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..mesh import of_parameter, with_paths
from ._rounding import rounded, step_key

Tree = Any


class LowPrecisionState(NamedTuple):
    """The state of `low_precision`.

    Attributes:
        step: the number of updates made, int32.
        inner_state: the state of the wrapped optimizer, with moments in bfloat16.
    """

    step: jax.Array
    inner_state: Any


def low_precision(
    optimizer: optax.GradientTransformation, *, moments: str = "bfloat16", seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer, so that its moments take half the memory.

    Moments are the float32 arrays of the optimizer's state that belong to a parameter and have its shape. They are
    converted to float32 before an update, and rounded stochastically after it. Rounding to nearest would stop a second
    moment: with `b2=0.999` a step changes it by up to 0.1 %, and neighboring bfloat16 numbers differ by 0.4 % or more.

    Args:
        optimizer: any optax optimizer.
        moments: the dtype of stored moments; only "bfloat16".
        seed: the seed of stochastic rounding.

    Raises:
        ValueError: if `moments` is not "bfloat16"; or, by `update`, if it is called without the parameters.
        TypeError: by `init`, if a moment is a float of another dtype.
    """
    if moments != "bfloat16":
        raise ValueError(f'`moments` is {moments!r}; it must be "bfloat16".')
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> Any:
        state = inner.init(params)
        count = jnp.zeros((), jnp.int32)
        return LowPrecisionState(count, _encoded(state, params, step_key(seed, count)))

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        if params is None:
            raise ValueError(
                "`low_precision` needs the parameters to find the moments, but `params` is None. Call "
                "`update(gradients, state, params)`."
            )
        shapes = jax.eval_shape(inner.init, params)
        own = jax.tree.map(lambda leaf, shape: leaf.astype(shape.dtype), state.inner_state, shapes)
        updates, own = inner.update(updates, own, params, **extra)
        count: Any = optax.safe_increment(state.step)
        return updates, LowPrecisionState(count, _encoded(own, params, step_key(seed, count)))

    return optax.GradientTransformationExtraArgs(init, update)


def _encoded(state: Tree, params: Tree, key: jax.Array) -> Tree:
    parameters = {path: param.shape for path, param in with_paths(params)}
    leaves = []
    for path, leaf in with_paths(state):
        if of_parameter(path, parameters) == leaf.shape and jnp.issubdtype(leaf.dtype, jnp.floating):
            if leaf.dtype != jnp.float32:
                raise TypeError(
                    f"the optimizer's state at {'.'.join(path)!r} is {leaf.dtype}; `low_precision` rounds only float32 "
                    "moments. Use float32 parameters and no `mu_dtype`, or, for bfloat16 parameters, "
                    "`stochastic_rounding(low_precision(optimizer))`."
                )
            leaf = rounded(leaf, key, path)
        leaves.append(leaf)
    return jax.tree.unflatten(jax.tree.structure(state), leaves)
