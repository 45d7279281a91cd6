"""What a derivative's rule computes as one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def as_one(function: Callable[..., Any], *operands: Any) -> Any:
    """Returns `function(*operands)`, which remat policies see as one operation, and whose derivatives are JAX's own.

    A policy that keeps products would keep every part of one that is made in parts. A rule cannot call its own
    `jax.custom_vjp` instead, which hides them too: where a gradient is differentiated forward, JAX would refuse it.

    Args:
        function: closes over no array that is traced.
        operands: pytrees of arrays.
    """
    operation = jax.custom_jvp(function)
    operation.defjvp(lambda primals, tangents: jax.jvp(function, primals, tangents))
    return operation(*operands)
