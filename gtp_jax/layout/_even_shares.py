"""When weights that the mesh cannot divide evenly are stored padded: at once, when a state is made, or never."""

from __future__ import annotations

import contextlib

import jax

_scope = jax.make_user_context(default_value=None)


def even_shares(pad: bool = True) -> contextlib.AbstractContextManager[None]:
    """Decides for models that are created in this scope, or sharded by `gtp_jax.shard` in it, when they store a weight
    padded whose dimensions the mesh does not divide. The padding is zeros at the end of one dimension, so all ranks
    store equal shares.

    Outside of such a scope, a model stores these weights whole over some axes, and a `TrainState` made of it stores
    them padded, with a warning. With `pad=True`, the model pads them at once, so they are whole on no device.

    Make a `TrainState` of a padded model. In a step, optimizers are given the logical arrays, unless updating the
    padded ones gives the same result; norms, checks and checkpoints read no padding. Code that does not know about the
    padding must not update the weights: `nnx.state` has the padded arrays, whose zeros would change the means and
    factors of some optimizers. Therefore, `nnx.Optimizer` refuses such a model.

    Args:
        pad: whether such models pad weights at once. With `False`, these weights stay whole in a `TrainState` too.
    """
    return _scope(pad)


def shares_are_even() -> bool:
    """Returns whether models store padded weights at once."""
    return _scope.value is True


def shares_may_be_even() -> bool:
    """Returns whether models, or at least the states made of them, may store padded weights."""
    return _scope.value is not False
