"""Applies an optimizer to a state, unless the update is to be skipped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..chain import stamped
from ..mesh import Path, with_paths
from ..nn import UpdateRule
from ..ops import MOST
from ..recipes import Recipe
from ._gradients import Computed, in_dtypes_of
from ._host_memory import device_shapes
from ._loss import mean
from ._optimizer import of_model
from ._scaling import amaxes_of_step, updated_scaling
from ._state import TrainState, check_optimizer_keeps_forms, constrained, of_optimizer, state_specs
from ._state_form import check_form_kept
from ._streamed import Update, streamed, streams
from ._under_backward import UnderBackward

Tree = Any


def never_skip(mesh: Mesh) -> jax.Array:
    """Returns `False` as an array that is replicated over a mesh. As the `skip` of a step, it skips nothing by
    itself."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback((), whole, lambda _: np.zeros((), np.bool_), dtype=np.bool_)


def updated(
    state: TrainState,
    computed: Computed,
    optimizer: optax.GradientTransformation,
    *,
    max_grad_norm: float | None,
    skip_nonfinite: bool | Literal["loss"],
    skip: jax.Array | None = None,
    recipe: Recipe | None = None,
    compute: Callable[[Tree], Computed] | None = None,
    under: UnderBackward | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Applies an optimizer to gradients.

    The loss and the norm of the gradients are summed over all devices anyway, and a NaN or Inf in any gradient makes
    the norm NaN or Inf. So all devices agree, without further communication, on whether the loss and the norm are
    finite.

    A parameter with an update rule (`UpdateRule`), such as a router's bias, is updated by its rule. The optimizer's
    update of it is discarded, and its gradient does not count in the norm.

    Args:
        state: the state before the update.
        computed: the loss and the gradients of the batch.
        optimizer: any optax optimizer.
        max_grad_norm: the global L2 norm to which larger gradients are scaled down; `None` for no limit.
        skip_nonfinite: whether to return the old state if the loss or the norm is not finite; `"loss"`: if the loss is
            not finite.
        skip: a bool scalar. If it is true, the old state is returned in any case. `None` has the effect of false.
        recipe: the recipe with which `computed` was computed.
        compute: a function that returns the loss and the gradients of the batch at other parameters, for an optimizer
            with a line search; `None` if the loss cannot be evaluated again.
        under: the part of this update that `computed` holds already.

    Raises:
        ValueError: if the optimizer state is of another optimizer, or the update changes the shapes or dtypes in that
            state; if the loss changed the shapes or dtypes of the model's variables, and the step has a mesh or may be
            skipped; if a `per_layer` in the optimizer raises it; or if the optimizer has a line search, and `compute`
            is `None` or `max_grad_norm` is set.
        TypeError: if the optimizer's update requires an extra argument other than `value`, `grad` and `value_fn`.

    Returns:
        The new state, or the old one if the update was skipped; and the metrics. These are `grad_norm`, the L2 norm of
        the gradients before clipping; `skipped`, whether the old state was returned; and the metrics of update rules,
        such as `expert_load`.
    """
    rules = state.model_def.update_rules
    ruled = {path: mean(g, computed.tokens) for path, g in with_paths(computed.gradients) if path in rules}
    norm = stamped(optax.tree.norm(_means(state.params, computed.gradients, computed.tokens, rules)), "in the update")
    skipped = _skipped(computed.total, computed.tokens, skip, norm if skip_nonfinite is True else None, skip_nonfinite)
    specs = state_specs(state.model_def, optimizer, device_shapes(state.params), state.scaling)
    model = state.model()
    amaxes = amaxes_of_step(model, recipe, computed.amaxes)

    update = _function(state, optimizer, rules, compute, clipped=max_grad_norm is not None)
    branches = skip_nonfinite or skip is not None
    away = streams(state.params, state.opt_state)

    def apply() -> TrainState:
        scale = None
        if max_grad_norm is not None:
            scale = jnp.minimum(1.0, min(max_grad_norm, MOST) / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
        scalars = computed.tokens, scale, mean(computed.total, computed.tokens), ruled
        given = computed.gradients, state.opt_state, state.params, scalars
        if away:
            keep = skipped if branches else None
            if under is not None and computed.moved is not None:
                wide = in_dtypes_of(state.params, computed.gradients)
                opt_state, params = under.update.finished(wide, *given[1:], computed.moved, keep)
            else:
                waits = skip_nonfinite is True or max_grad_norm is not None
                opt_state, params = streamed(update, *given, state.model_def.specs, computed.pieces, keep, waits=waits)
        else:
            opt_state, params = update(*given)
        scaling = updated_scaling(state.scaling, model, recipe, amaxes)
        own = computed.model_state, state.frozen, scaling
        after = TrainState(params, opt_state, state.step + 1, state.model_def, *own)
        return constrained(after, specs)

    if branches or not jax.sharding.get_abstract_mesh().empty:
        check_form_kept(state.model_state, computed.model_state)
    # A branch lets XLA update in place. Selecting between old and new arrays took 6 to 18 % more temporary memory.
    if not branches:
        after = apply()
    elif away:
        after = apply()
        others = lambda one: (one.step, one.model_state, one.scaling)  # noqa: E731
        step, *more = lax.cond(skipped, lambda: others(state), lambda: others(after))
        after = TrainState(after.params, after.opt_state, step, state.model_def, more[0], state.frozen, more[1])
    else:
        after = lax.cond(skipped, lambda: state, apply)
    metrics = {"grad_norm": norm, "skipped": skipped, **_metrics(rules, ruled)}
    # The state is constrained so that its partition never changes, and a step can donate its memory.
    return constrained(after, specs), metrics


def under_backward(
    state: TrainState,
    loss: Callable[[TrainState], Computed],
    optimizer: optax.GradientTransformation,
    *,
    max_grad_norm: float | None,
    skip_nonfinite: bool | Literal["loss"],
    skip: jax.Array | None = None,
    compute: Callable[[Tree], Computed] | None = None,
) -> UnderBackward | None:
    """Returns the part of an update that can be computed under backward: that of arrays on the host, if it depends on
    no other gradient. The arguments are those of `updated`, and a function that computes the loss of the batch.

    Returns:
        That part; `None` if there is none.
    """
    rules = state.model_def.update_rules
    waits = skip_nonfinite is True or max_grad_norm is not None
    if waits or rules or not streams(state.params, state.opt_state):
        return None
    scalars = lambda total, tokens: (tokens, None, mean(total, tokens), {})  # noqa: E731
    skips = skip_nonfinite or skip is not None
    function = _function(state, optimizer, rules, compute, clipped=False)
    forms = jax.eval_shape(lambda state: scalars(*loss(state)[:2]), state)
    given = (device_shapes(state.params), state.opt_state, state.params)
    update = Update(function, *given, forms, state.model_def.specs, skips=bool(skips))
    if not update.of_scalars:
        return None
    skipped = lambda total, tokens, skip: _skipped(total, tokens, skip, None, skip_nonfinite)  # noqa: E731
    own = update.arrays(*given)[1]
    return UnderBackward(update, own, update.read(*given), scalars, skipped if skips else None, skip)


def _skipped(
    total: jax.Array,
    tokens: jax.Array | None,
    skip: jax.Array | None,
    norm: jax.Array | None,
    skip_nonfinite: bool | Literal["loss"],
) -> jax.Array:
    """Returns whether to skip an update, as a bool scalar. The arguments are those of `updated`, and the norm of the
    gradients if it must be finite."""
    finite = jnp.isfinite(mean(total, tokens))
    finite = finite if norm is None else finite & jnp.isfinite(norm)
    skipped = ~finite if skip_nonfinite else jnp.zeros((), jnp.bool)
    return skipped if skip is None else skipped | skip


def _function(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    rules: Mapping[Path, UpdateRule],
    compute: Callable[[Tree], Computed] | None,
    *,
    clipped: bool,
) -> Callable[[Tree, Tree, Tree, Tree], tuple[Tree, Tree]]:
    """Returns a function `(gradients, opt_state, params, scalars) -> (opt_state, params)` that applies an optimizer.

    Its scalars are the number of tokens, the factor of clipping or `None`, the loss, and the gradients of `rules`. The
    arguments are those of `updated`; `clipped` says whether the step clips gradients.
    """

    def update(found: Tree, opt_state: Tree, params: Tree, scalars: Tree) -> tuple[Tree, Tree]:
        tokens, scale, loss, ruled = scalars
        # The means are computed here, inside the branch, so that XLA fuses them with the update as it does without a
        # branch. The results of both programs are then the same bit for bit.
        grads = _means(params, found, tokens, rules)
        if scale is not None:
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        value_fn = _value_fn(compute, rules, clipped=clipped)
        with of_optimizer(state.model_def, opt_state, params, optimizer):
            own = of_model(optimizer, state.model_def).update
            updates, after = own(grads, opt_state, params, value=loss, grad=grads, value_fn=value_fn)
        check_optimizer_keeps_forms(opt_state, after)
        moved = {path: rules[path].moved(leaf, ruled[path]) for path, leaf in with_paths(params) if path in rules}
        return after, _with(optax.apply_updates(params, updates), moved)

    return update


def check_update(state: TrainState, optimizer: optax.GradientTransformation) -> None:
    """Traces the update of a state that is partly on the host, so that a run refuses what it cannot use before anything
    is compiled. The state may be abstract.

    Raises:
        ValueError: if the optimizer's update of an array on the host cannot be computed in blocks.
    """
    if streams(state.params, state.opt_state):
        total: Any = jax.ShapeDtypeStruct((), jnp.float32)
        computed = Computed(total, None, device_shapes(state.params), state.model_state, ())
        update = functools.partial(updated, optimizer=optimizer, max_grad_norm=None, skip_nonfinite=True)
        jax.eval_shape(update, state, computed)


def _value_fn(
    compute: Callable[[Tree], Computed] | None, rules: Mapping[Path, UpdateRule], *, clipped: bool
) -> Callable[[Tree], jax.Array]:
    """Returns the mean loss of the batch as a differentiable function of the parameters, for optax's line searches.

    Args:
        compute: a function that returns the loss and the gradients at given parameters, or `None`.
        rules: the parameters that have update rules. Their gradients are returned as 0.
        clipped: whether the step clips gradients.

    Raises:
        ValueError: when the function is called, if `compute` is `None` or gradients are clipped.
    """

    def value_and_gradient(params: Tree) -> tuple[jax.Array, Tree]:
        if compute is None:
            raise ValueError(
                "the optimizer evaluates the loss at other parameters, as a line search does, but a step over "
                "`replicas` of unequal degree computes it only once. Use an optimizer without a line search, such as "
                "`optax.lbfgs(learning_rate, linesearch=None)`."
            )
        if clipped:
            raise ValueError(
                "the optimizer evaluates the loss at other parameters, as a line search does. That requires the "
                "gradients of the loss itself, but `max_grad_norm` scales them. Pass `max_grad_norm=None`."
            )
        computed = compute(params)
        return mean(computed.total, computed.tokens), _means(params, computed.gradients, computed.tokens, rules)

    @jax.custom_vjp
    def value(params: Tree) -> jax.Array:
        return value_and_gradient(params)[0]

    value.defvjp(value_and_gradient, lambda gradient, scale: (jax.tree.map(lambda g: scale * g, gradient),))
    return value


def _means(params: Tree, found: Tree, tokens: jax.Array | None, rules: Mapping[Path, UpdateRule]) -> Tree:
    """Returns the gradients of the mean loss, with 0 for parameters that have update rules."""
    means = jax.tree.map(lambda g: mean(g, tokens), in_dtypes_of(params, found))
    return _with(means, {path: jnp.zeros_like(leaf) for path, leaf in with_paths(means) if path in rules})


def _metrics(rules: Mapping[Path, UpdateRule], gradients: Mapping[Path, jax.Array]) -> dict[str, jax.Array]:
    """Returns the metrics of update rules. Each class of rules reports once, for all its parameters.

    Args:
        rules: the update rules, by path of the parameter.
        gradients: the mean gradients of the parameters that have rules, by path.
    """
    found: dict[str, jax.Array] = {}
    for kind in dict.fromkeys(type(rules[path]) for path in gradients):
        own = [path for path in gradients if type(rules[path]) is kind]
        found |= rules[own[0]].metrics([gradients[path] for path in own])
    return found


def _with(tree: Tree, values: Mapping[Path, jax.Array]) -> Tree:
    """Returns a pytree in which the leaves at the paths of `values` are replaced."""
    if not values:
        return tree
    leaves = [values.get(path, leaf) for path, leaf in with_paths(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)
