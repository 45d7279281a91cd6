"""Runs a function in local view: on each rank's own part of the state and of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..mesh import degrees, use_roles
from ._rows import check_arrays, check_rows
from ._state import TrainState

Tree = Any


def over_mesh(local: Callable[..., Any], state: TrainState, microbatches: int, out: Any) -> Callable[..., Any]:
    """Returns a function of a batch that calls `local` on each rank's own part of the arrays. Without a mesh, it calls
    `local` once, on the whole arrays.

    Args:
        local: `(params, frozen, scaling, batch, step) -> result`.
        state: the state, which holds all arguments of `local` except the batch.
        microbatches: the number of microbatches into which `local` splits its batch.
        out: the partitions of the result, a pytree prefix.

    Raises:
        ValueError: if the model has variables that are neither parameters nor frozen. By the function, if the batch
            contains a list of numbers, a scalar, or an array whose first dimension the ranks and microbatches cannot
            divide evenly; if the batch is split and its arrays have different numbers of rows; or if the model was
            built for other mesh degrees.
    """
    model_def = state.model_def
    _check_model_state(state)

    def run(batch: Tree) -> Any:
        model_def.check_mesh()
        check_arrays(batch)
        roles = model_def.roles
        parts = degrees(roles.batch) * microbatches
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            if jnp.ndim(leaf) == 0 or leaf.shape[0] % parts:
                raise ValueError(
                    f"`batch`{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; its first dimension is the "
                    f"batch and must be a multiple of {' * '.join(roles.batch)} * microbatches = {parts}."
                )
        if parts > 1:
            check_rows(batch)
        if jax.sharding.get_abstract_mesh().empty:
            return local(state.params, state.frozen, state.scaling, batch, state.step)
        whole = PartitionSpec()
        into = (model_def.specs, model_def.frozen_specs, whole, PartitionSpec(roles.batch), whole)

        def in_roles(*args: Any) -> Any:
            with use_roles(roles):
                return local(*args)

        on_mesh = jax.shard_map(in_roles, in_specs=into, out_specs=out, check_vma=False)
        return on_mesh(state.params, state.frozen, state.scaling, batch, state.step)

    return run


def _check_model_state(state: TrainState) -> None:
    """Refuses a model that has variables that are neither parameters nor frozen, such as batch statistics, because
    local view does not support them.

    Raises:
        ValueError: if there are any; the message names the first ones.
    """
    if state.model_state:
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.model_state)]
        raise ValueError(
            f"the model holds variables other than parameters ({', '.join(paths[:3])}), which in `view='local'` each "
            "rank would write separately. Use `view='global'`, the default."
        )


def over_all_ranks(values: Tree) -> Tree:
    """Sums values over the whole mesh.

    The ranks along an axis that does not shard the batch have the same tokens, and count each of them again. Losses,
    tokens and gradients all contain the same factor, which cancels when a sum is divided by the number of tokens.
    """
    names = jax.sharding.get_abstract_mesh().axis_names
    return lax.psum(values, names) if names else values
