"""Wraps what the rule of a derivative computes as one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def as_one(function: Callable[..., Any], *operands: Any) -> Any:
    """Returns `function(*operands)` as one operation for remat policies, with the derivatives that JAX gives it.

    If a product is computed in parts, a policy that saves products would save every part. A rule cannot hide them by
    calling its own `jax.custom_vjp`, because JAX would raise an error where a gradient is differentiated in forward
    mode.

    Args:
        function: a function that closes over no traced array.
        operands: pytrees of arrays.
    """
    operation = jax.custom_jvp(function)
    operation.defjvp(lambda primals, tangents: jax.jvp(function, primals, tangents))
    return operation(*operands)
