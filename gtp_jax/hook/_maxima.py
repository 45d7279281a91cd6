"""Provides arrays whose gradients are maxima instead of sums.

JAX adds the gradients of an array that is used several times, as in two calls of a module or in the iterations of a
loop. But the gradient of the slot of a `gtp_jax.weights.Scaling` is an amax, and several amaxes must be combined by
their maximum. Such a slot therefore has Flax's dtype `fm32`: float32, except that the sum of two gradients is their
maximum. Where a slot enters a `shard_map`, or the loop over the layers of a chain, it is float32 instead. It is used
only once there, so that JAX does not add its gradients.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import fm32
from jax import lax

from ..weights import Scaling


def with_maxima(scaling: Scaling) -> Scaling:
    """Returns the scaling with a slot whose gradients are combined by their maximum."""
    return dataclasses.replace(scaling, slot=maximum_gradient(scaling.slot))


def without_maxima(scaling: Scaling) -> Scaling:
    """Returns the scaling with a slot in float32. The slot must be used only once, because gradients of several uses
    would be added."""
    return dataclasses.replace(scaling, slot=_added_gradient(scaling.slot))


@jax.custom_vjp
def maximum_gradient(x: jax.Array) -> jax.Array:
    """Converts a float32 array to `fm32`, a dtype in which the sum of two gradients is their maximum."""
    return lax.convert_element_type(x, fm32)


@jax.custom_vjp
def _added_gradient(x: jax.Array) -> jax.Array:
    """Converts the result of `maximum_gradient` back to float32."""
    return lax.convert_element_type(x, jnp.float32)


def _to_float(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (lax.convert_element_type(gradient, jnp.float32),)


def _to_maxima(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (lax.convert_element_type(gradient, fm32),)


# JAX's own rule for the gradient of a cast does not support `fm32`
maximum_gradient.defvjp(lambda x: (maximum_gradient(x), None), _to_float)
_added_gradient.defvjp(lambda x: (_added_gradient(x), None), _to_maxima)
