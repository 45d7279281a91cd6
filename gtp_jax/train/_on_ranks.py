"""Runs a function in local view: on each rank's own part of the state and of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..mesh import Roles, degree, degrees, refuse_parts_of_sequences, sequence_axis, use_roles
from ._batch import BY_TOKEN, WHOLE, name_of
from ._rows import check_arrays, check_parts, check_rows
from ._state import TrainState

Tree = Any


def over_mesh(
    local: Callable[..., Any],
    loss: Callable[..., Any],
    state: TrainState,
    microbatches: int,
    out: Any,
    more: tuple[Tree, Tree] = ((), ()),
) -> Callable[..., Any]:
    """Returns a function of a batch that calls `local` on each rank's own part of the arrays. Without a mesh, it calls
    `local` once, on the whole arrays.

    Args:
        local: `(params, frozen, scaling, batch, step, more) -> result`.
        loss: the loss that `local` computes.
        state: the state, which holds all arguments of `local` except the batch.
        microbatches: the number of microbatches into which `local` splits its batch.
        out: the partitions of the result, a pytree prefix.
        more: a pytree of more arrays, and their partitions.

    Raises:
        ValueError: if the model has variables that are neither parameters nor frozen. By the function, if the batch
            contains a list of numbers, a scalar, or an array whose first dimension the ranks and microbatches cannot
            divide evenly; if the batch is split and its arrays have different numbers of rows; for the reasons of
            `refuse_parts_of_sequences` and `_specs_of_batch`; or if the model was built for other mesh degrees.
    """
    model_def = state.model_def
    _check_model_state(state)

    def run(batch: Tree) -> Any:
        model_def.check_mesh()
        if not getattr(loss, "context_parallel", False):
            remedy = (
                "Use `view='global'`; or, if no code of the loss and its model shifts tokens or counts positions, set "
                "`loss.context_parallel = True`."
            )
            refuse_parts_of_sequences(model_def.roles, "the loss is computed", remedy)
        check_arrays(batch)
        roles = model_def.roles
        parts = degrees(roles.batch) * microbatches
        check_parts(batch, parts, f"{' * '.join(roles.batch)} * microbatches")
        if parts > 1:
            check_rows(batch)
        if jax.sharding.get_abstract_mesh().empty:
            return local(state.params, state.frozen, state.scaling, batch, state.step, more[0])
        whole = PartitionSpec()
        into = (model_def.specs, model_def.frozen_specs, whole, _specs_of_batch(batch, roles), whole, more[1])

        def in_roles(*args: Any) -> Any:
            with use_roles(roles):
                return local(*args)

        on_mesh = jax.shard_map(in_roles, in_specs=into, out_specs=out, check_vma=False)
        return on_mesh(state.params, state.frozen, state.scaling, batch, state.step, more[0])

    return run


def _specs_of_batch(batch: Tree, roles: Roles) -> Tree:
    """Returns the partition of each array of a batch in local view: dimension 0 over the axes of the batch, and, where
    each token has a number, dimension 1 over the axis `sequence`.

    Raises:
        ValueError: if there is such an axis, and the name of an array does not say whether it has a number for each
            token; if there is one number for each example, whose loss every rank of the axis would count; or if the
            axis does not divide the sequence.
    """
    axis = sequence_axis(roles, 3)

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        if axis is None:
            return PartitionSpec(roles.batch)
        where, name = f"`batch`{jax.tree_util.keystr(path)}", name_of(path)
        if name in WHOLE:
            return PartitionSpec(roles.batch)
        if name not in BY_TOKEN:
            raise ValueError(
                f"{where} has shape {jnp.shape(leaf)}, and {axis} = {degree(axis)} divides sequences. In local view, "
                f"the names of arrays say how: {', '.join(map(repr, BY_TOKEN))} are divided along dimension 1, and "
                f"{', '.join(map(repr, WHOLE))} are not. Rename it, or use `view='global'`, where arrays of any name "
                "are right."
            )
        if jnp.ndim(leaf) < 2:
            raise ValueError(
                f"{where} has shape {jnp.shape(leaf)}, one number for each example, and {axis} = {degree(axis)} "
                "divides sequences. In local view, a rank has a part of each example, to which this number does not "
                "belong. Use `view='global'`."
            )
        if leaf.shape[1] % degree(axis):
            raise ValueError(
                f"{where} has shape {jnp.shape(leaf)}; dimension 1 is the sequence and must be a multiple of {axis} = "
                f"{degree(axis)}. Pad the sequence, with targets of -1."
            )
        return PartitionSpec(roles.batch, axis)

    return jax.tree_util.tree_map_with_path(spec, batch)


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
