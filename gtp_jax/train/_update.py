"""What an optimizer makes of a state and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ._state import TrainState, constrained, state_specs

Tree = Any


def updated(
    state: TrainState,
    grads: Tree,
    optimizer: optax.GradientTransformation,
    max_grad_norm: float | None,
    model_state: Tree,
) -> tuple[TrainState, jax.Array]:
    """Returns the state after an update, and the L2 norm of the gradients ahead of clipping.

    Args:
        state: before it.
        grads: of the parameters, global arrays.
        optimizer: any optax optimizer.
        max_grad_norm: scales gradients down to this norm.
        model_state: the model's other variables after the step.
    """
    norm = optax.tree.norm(grads)
    if max_grad_norm is not None:
        scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
        grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    own = model_state, state.frozen
    after = TrainState(params, opt_state, state.step + 1, state.model_def, *own)  # pyright: ignore[reportArgumentType]
    specs = state_specs(state.model_def, optimizer, state.params)
    # so that the state can be donated, and its partition never drifts
    return constrained(after, specs), norm
