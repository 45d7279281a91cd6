"""What an optimizer makes of a state and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..mesh import Path, with_paths
from ._state import TrainState, constrained, state_specs

Tree = Any


def updated(
    state: TrainState,
    grads: Tree,
    optimizer: optax.GradientTransformation,
    max_grad_norm: float | None,
    model_state: Tree,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Returns the state after an update, and metrics: `grad_norm`, the L2 norm of the gradients ahead of clipping; of a
    model with biases of routers `expert_load`, that of the busiest expert of any layer, 1 if it has an even share.

    What the optimizer makes of such biases does not count, nor do their gradients in the norm: they are loads, by which
    biases move here.

    Args:
        state: before it.
        grads: of the parameters, global arrays.
        optimizer: any optax optimizer.
        max_grad_norm: scales gradients down to this norm.
        model_state: the model's other variables after the step.
    """
    rates = state.model_def.bias_rates
    loads = {path: leaf for path, leaf in with_paths(grads) if path in rates}
    grads = _with(grads, {path: jnp.zeros_like(load) for path, load in loads.items()})
    norm = optax.tree.norm(grads)
    if max_grad_norm is not None:
        scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
        grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    biases = {path: leaf for path, leaf in with_paths(state.params) if path in rates}
    params = _with(params, {path: _moved(bias, loads[path], rates[path]) for path, bias in biases.items()})
    own = model_state, state.frozen
    after = TrainState(params, opt_state, state.step + 1, state.model_def, *own)  # pyright: ignore[reportArgumentType]
    specs = state_specs(state.model_def, optimizer, state.params)
    # so that the state can be donated, and its partition never drifts
    metrics = {"grad_norm": norm}
    if loads:
        metrics["expert_load"] = jnp.max(jnp.stack([jnp.max(_relative(load)) for load in loads.values()]))
    return constrained(after, specs), metrics


def _moved(bias: jax.Array, load: jax.Array, rate: float) -> jax.Array:
    """Returns biases after a step: lower of experts that had more than an even share, higher of those that had less."""
    excess = load.shape[-1] * load - jnp.sum(load, axis=-1, keepdims=True)
    return bias - rate * jnp.sign(excess).astype(bias.dtype)


def _relative(load: jax.Array) -> jax.Array:
    """Returns loads as multiples of an even share."""
    total = jnp.sum(load, axis=-1, keepdims=True)
    return load * load.shape[-1] / jnp.where(total > 0, total, 1)


def _with(tree: Tree, values: Mapping[Path, jax.Array]) -> Tree:
    """Returns a pytree with these leaves in place of those at their paths."""
    if not values:
        return tree
    leaves = [values.get(path, leaf) for path, leaf in with_paths(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)
