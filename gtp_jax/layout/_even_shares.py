"""Whether the models that are created in scope may store padded arrays."""

from __future__ import annotations

import contextlib

import jax

_scope = jax.make_user_context(default_value=False)


def even_shares(pad: bool = True) -> contextlib.AbstractContextManager[None]:
    """Lets models that are created in this scope, or sharded by `gtp_jax.shard` in it, pad a weight if the mesh divides
    none of its dimensions, instead of storing it whole over some axes. The padding is zeros at the end of one
    dimension, so all ranks store equal shares.

    Make a `TrainState` of such a model. In a step, optimizers are given the logical arrays, unless updating the padded
    ones gives the same result; norms, checks and checkpoints read no padding. Code that does not know about the padding
    must not update the weights: `nnx.state` has the padded arrays, whose zeros would change the means and factors of
    some optimizers. Therefore, `nnx.Optimizer` refuses such a model.

    Args:
        pad: `False` ends an outer scope.
    """
    return _scope(pad)


def shares_are_even() -> bool:
    """Returns whether models may store padded arrays."""
    return _scope.value
