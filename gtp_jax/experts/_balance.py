"""Router biases that keep the load of experts even (arXiv 2408.15664)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from ..nn import make_whole, set_update_rule


@dataclasses.dataclass(frozen=True)
class Balance:
    """An `UpdateRule` that moves a router's bias by the load of the experts, which arrives as the bias's gradient.

    Attributes:
        rate: how far each step moves the bias of an expert.
    """

    rate: float

    def moved(self, value: jax.Array, gradient: jax.Array) -> jax.Array:
        """Returns the biases after a step: lower for experts with more than an even share of tokens, higher for those
        with less."""
        excess = gradient.shape[-1] * gradient - jnp.sum(gradient, axis=-1, keepdims=True)
        return value - self.rate * jnp.sign(excess).astype(value.dtype)

    def metrics(self, gradients: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """Returns `expert_load`, the load of the busiest expert of any layer as a multiple of an even share."""
        return {"expert_load": jnp.max(jnp.stack([jnp.max(_relative(load)) for load in gradients]))}


def make_router_bias(num_experts: int, rate: float) -> nnx.Param:
    """Returns a router's bias: float32 zeros, replicated on every rank. Each step moves it by `rate`; no optimizer
    updates it."""
    bias = make_whole((num_experts,), lambda _, shape, dtype: jnp.zeros(shape, dtype), jax.random.key(0), jnp.float32)
    set_update_rule(bias, Balance(rate))
    return bias


def _relative(load: jax.Array) -> jax.Array:
    """Returns loads as multiples of an even share."""
    total = jnp.sum(load, axis=-1, keepdims=True)
    return load * load.shape[-1] / jnp.where(total > 0, total, 1)
