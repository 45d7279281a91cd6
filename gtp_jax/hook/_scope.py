"""A context in which sharded models are called as if they had not been hooked."""

from __future__ import annotations

import contextlib

import jax

_off = jax.make_user_context(default_value=False)


def without_hook() -> contextlib.AbstractContextManager[None]:
    """Calls the blocks of sharded models as ordinary modules: XLA gathers their weights where and when it wants to.

    For what the hook refuses, such as forward-mode differentiation. It is part of the key of `jax.jit`'s cache, and
    also a decorator.
    """
    return _off(True)


def hook_is_off() -> bool:
    """Returns whether `without_hook` is in scope."""
    return _off.value
