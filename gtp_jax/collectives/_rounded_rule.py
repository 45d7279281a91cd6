"""Makes a matmul of rounded operands over tp differentiable, from its product and its backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..ops import Products


def rounded_rule(product: Callable[..., tuple[Any, Any]], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a differentiable function `(x, weight, slot, products, axis, dtype) -> y`.

    Args:
        product: `(x, weight, slot, products, axis, *, backward) -> (y, saved)`, where `backward` says whether `saved`
            is needed.
        backward: `(axis, dtype, (saved, weight, products), gradient)` returns the gradients of the first four
            arguments. That of the weight arrives in the slot, in this dtype.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
    def multiplied(x: Any, weight: Any, slot: jax.Array, products: Products, axis: str, dtype: np.dtype) -> Any:
        del dtype
        return product(x, weight, slot, products, axis, backward=False)[0]

    def forward(x: Any, weight: Any, slot: jax.Array, products: Products, axis: str, dtype: np.dtype) -> Any:
        del dtype
        y, saved = product(x, weight, slot, products, axis, backward=True)
        return y, (saved, weight, products)

    multiplied.defvjp(forward, backward)
    return multiplied
