"""The gradient that a step gives its optimizer."""

import jax
import jax.numpy as jnp
import optax


def keeps_gradient(optimizer):
    """Returns the optimizer, after one that keeps the gradient it is given."""
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, state, params: (grads, grads)
    )
    return optax.chain(keep, optimizer)
