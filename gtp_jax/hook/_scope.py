"""A context in which sharded models are called without the hook."""

from __future__ import annotations

import contextlib

import jax

_off = jax.make_user_context(default_value=False)


def without_hook() -> contextlib.AbstractContextManager[None]:
    """Calls the blocks of sharded models as ordinary modules in a context; XLA decides when to gather their weights.

    Use it for what the hook refuses, such as forward-mode differentiation. The setting is part of the cache key of
    `jax.jit`. The context also works as a decorator.
    """
    return _off(True)


def hook_is_off() -> bool:
    """Returns whether `without_hook` is in scope."""
    return _off.value
