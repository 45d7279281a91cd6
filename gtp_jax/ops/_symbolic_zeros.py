"""Calls functions whose derivative rule is told which arguments are differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def call_with_zeros(function: Callable[..., Any], *args: Any) -> Any:
    """Returns `function(*args)`, where `function` has a derivative rule with `symbolic_zeros=True`.

    JAX refuses such a function in a `shard_map` that is not traced; there it is traced by `jax.jit`.
    """
    try:
        return function(*args)
    except NotImplementedError as error:
        if "symbolic_zeros" not in str(error):
            raise
        return jax.jit(function)(*args)
