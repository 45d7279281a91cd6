"""Finds the sample, rank and layer that make a step's loss or gradients not finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..mesh import degrees, of_all_processes, on_device, with_paths
from ..recipes import Phases, Recipe, recipe_at, recipe_of_call
from ._gradients import gradients, mean_gradients
from ._loss import Loss, mean
from ._memory import check_values
from ._probes import Probes
from ._request import Request, View
from ._rows import check_arrays, check_filled, check_rows
from ._state import TrainState, check_state

Tree = Any


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The cause of a step whose loss or gradients are not finite.

    Attributes:
        parameter: the path of the first parameter that is not finite itself; `None` if all are finite. If it is set,
            no other attribute is.
        sample: the first row of the batch that was found to make the loss or a gradient not finite; if there is none,
            the first of which only the norm of the gradients overflows; `None` if none was found.
        rank: the coordinates, on the mesh axes that shard the batch, of the ranks that hold the sample; `None` without
            a sample, and empty without a mesh.
        devices: the ids of these ranks' devices; empty without a sample or a mesh.
        layer: the path of the first called module whose output or gradient is not finite, with the layer's number in a
            `Stack`; empty for the model itself. The model's own output, in which logits may be masked with `-inf`, is
            named only if its gradient is not finite either, or if everything else is finite. `None` without a sample,
            or if the outputs of all modules and the gradients of these outputs are finite; the cause is then elsewhere,
            such as in the loss function or in the gradient of a parameter.
        kind: what is not finite in `layer`: `output`, or `gradient` for the gradient of the loss with respect to the
            module's output; `None` if `layer` is.
    """

    parameter: str | None = None
    sample: int | None = None
    rank: dict[str, int] | None = None
    devices: tuple[int, ...] = ()
    layer: str | None = None
    kind: str | None = None

    def __str__(self) -> str:
        if self.parameter is not None:
            return f"the parameter {self.parameter} is not finite itself: an earlier update has ruined the state"
        if self.sample is None:
            return (
                "each sample alone gives finite numbers from this state: a device may have computed wrongly, or only "
                "the batch as a whole is not finite"
            )
        where = " x ".join(f"{axis} {index}" for axis, index in (self.rank or {}).items())
        of_rank = f" of rank {where} (devices {', '.join(map(str, self.devices))})" if where else ""
        if self.layer is None:
            what = (
                "the output of every layer and the gradient of that output are finite: look at the loss function, "
                "after the last layer, and at the gradients of parameters"
            )
        elif not self.layer and self.kind == "gradient":
            what = "the model's output is finite, and the gradient that reaches it is not: look at the loss function"
        else:
            what = f"the first {self.kind} that is not finite is that of {self.layer or 'the model itself'}"
        return f"sample {self.sample} of the batch{of_rank}: {what}"


def diagnose(
    loss: Loss,
    state: TrainState,
    batch: Tree,
    *,
    has_aux: bool = False,
    recipe: Recipe | Phases | None = None,
    view: View = "global",
    seed: int = 0,
) -> Diagnosis:
    """Finds the sample, the rank and the first layer that make the loss or a gradient of a batch NaN or Inf.

    Pass the state that the skipped step returned, which is the old state, and the batch of that step. Call this in
    every process. The arguments are those of `train_step`; state and batch are not donated.

    The search first runs the samples in groups, with one sample for each part into which the mesh divides a batch. If
    the result of a group is not finite, it runs the samples of the group one at a time, each repeated in every part. It
    then runs the first sample whose result is not finite once more, and checks the output and the gradient of every
    module that is called. The loss and its gradients are compiled at most twice.

    Raises:
        ValueError: if `view` is neither 'global' nor 'local', or `has_aux` is used in local view; if the state's arrays
            were donated to a step, or the state has no values; if the number of rows is not a multiple of the number of
            parts, or differs between leaves; or if the batch holds an empty array, a list of numbers or no array with
            rows. The batch is not checked if a parameter is not finite. Errors of the step pass through.
        TypeError: if `loss` is not callable, or returns anything other than `train_step` allows; if `state` is not a
            `TrainState`; or if `recipe` is not a recipe.
    """
    request = Request(loss, view, has_aux, 1, recipe_at(recipe, 0), seed=seed).checked()
    check_state(state)
    check_values(state)
    own = recipe.at(int(state.step)) if isinstance(recipe, Phases) else recipe
    request = request._replace(recipe=recipe_of_call(own))
    state = dataclasses.replace(state, params=on_device(state.params))
    flags, names = _finite_leaves(state.params)
    if not flags.all():
        return Diagnosis(parameter=names[int(np.argmin(flags))])
    roles, mesh = state.model_def.roles, jax.sharding.get_mesh()
    ranks = 1 if mesh.empty else degrees(roles.batch)
    rows = _rows_of(batch)
    if rows % ranks:
        raise ValueError(f"`batch` has {rows} rows; it must have a multiple of {' * '.join(roles.batch)} = {ranks}.")
    probes = Probes(state)

    def finite(state: TrainState, batch: Tree, places: jax.Array) -> tuple[jax.Array, jax.Array]:
        try:
            found = gradients(
                request, state, jax.tree.map(lambda a: jnp.take(a, places, axis=0) if jnp.ndim(a) else a, batch)
            )
        except Exception as error:
            if rows > ranks:
                error.add_note(
                    f"`diagnose` gives the loss {ranks} of the {rows} rows of `batch` at a time. Take the number of "
                    "rows from the batch that the loss is given, not from elsewhere."
                )
            raise
        means = mean_gradients(state.params, found)
        values = jnp.isfinite(mean(found.total, found.tokens))
        for leaf in jax.tree.leaves(means):
            values &= jnp.isfinite(leaf).all()
        return values, values & jnp.isfinite(optax.tree.norm(means))

    jitted = jax.jit(finite)

    def is_finite(places: Sequence[int]) -> tuple[bool, bool]:
        values, norm = jitted(state, batch, np.asarray(places, np.int32))
        return bool(values), bool(norm)

    sample = None
    for first in range(0, rows, ranks):
        group = range(first, first + ranks)
        found = {} if all(is_finite(group)) else {row: is_finite([row] * ranks) for row in group}
        if ruined := [row for row, (values, _) in found.items() if not values]:
            sample = ruined[0]
            break
        overflowing = [row for row, (_, norm) in found.items() if not norm]
        sample = overflowing[0] if sample is None and overflowing else sample
    if sample is None:
        return Diagnosis()
    with probes as observed:
        # This is a new function, so JAX traces it again, this time with the probes.
        watched = jax.jit(lambda *args: finite(*args))
        jax.block_until_ready(watched(observed, batch, np.asarray([sample] * ranks, np.int32)))
        jax.effects_barrier()
    kind, layer = _first(probes)
    rank, devices = _rank(sample // (rows // ranks), roles.batch, mesh)
    return Diagnosis(None, sample, rank, devices, layer, kind)


def _rows_of(batch: Tree) -> int:
    """Returns the number of examples in a batch.

    Raises:
        ValueError: if the batch cannot be run example by example.
    """
    check_filled(batch)
    check_arrays(batch)
    check_rows(batch, "whose samples are run one by one")
    arrays = [leaf for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    if not arrays:
        raise ValueError("`batch` holds no array with a row for each sample, so no sample can be run alone.")
    return arrays[0].shape[0]


def _finite_leaves(params: Tree) -> tuple[np.ndarray, list[str]]:
    flags = jax.jit(lambda xs: jnp.array([jnp.isfinite(x).all() for x in xs], bool))(jax.tree.leaves(params))
    return np.asarray(flags.addressable_shards[0].data), [".".join(path) for path, _ in with_paths(params)]


def _first(probes: Probes) -> tuple[str | None, str | None]:
    """Returns the kind and the module's path of the first probe that saw a value that is not finite, in any process;
    `(None, None)` if no probe did.

    The model's own output counts only if its gradient is not finite either, or if no other probe in this process saw
    such a value. The reason is that logits may be masked with `-inf`, and that a loss need not read everything that a
    model returns.
    """
    never = np.int32(np.iinfo(np.int32).max)
    fired = probes.fired
    if ("gradient", "") not in map(probes.name, fired):
        fired = {number for number in fired if probes.name(number) != ("output", "")} or fired
    first = int(np.min(of_all_processes(np.int32(min(fired, default=int(never))))))
    return (None, None) if first == never else probes.name(first)


def _rank(number: int, axes: Sequence[str], mesh: Any) -> tuple[dict[str, int], tuple[int, ...]]:
    """Returns the coordinates of the ranks that hold one part of the batch, on the mesh axes that shard it, and the ids
    of their devices. Both are empty without a mesh.

    Args:
        number: the number of the part.
        axes: the mesh axes that shard the batch.
        mesh: the mesh in scope.
    """
    if mesh.empty:
        return {}, ()
    axes = [axis for axis in axes if axis in mesh.shape]
    where = np.unravel_index(number, [mesh.shape[axis] for axis in axes])
    rank = {axis: int(index) for axis, index in zip(axes, where, strict=True)}
    devices = mesh.devices[tuple(rank.get(axis, slice(None)) for axis in mesh.axis_names)]
    return rank, tuple(int(device.id) for device in np.asarray(devices).reshape(-1))
