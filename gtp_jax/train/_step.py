"""One optimizer step, and one evaluation, over the mesh in scope."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax

from .._foreign import brief
from ..mesh import Roles, current_roles, degree, degrees, platform
from ..recipes import Recipe, check_recipe, recipe_of_call
from ._gradients import VIEWS, Computed, Request, View, gradients, losses, mean_gradients
from ._jit import Jitted
from ._loss import Loss, check_loss, mean
from ._memory import check_values
from ._optimizer import check_optimizer
from ._options import compile_options
from ._own_step import BringsStep
from ._state import TrainState
from ._update import updated
from ._zero import ReduceOverDp, check_reduce_over_dp

Tree = Any


def train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    microbatches: int = 1,
    max_grad_norm: float | None = None,
    skip_nonfinite: bool = True,
    recipe: Recipe | None = None,
    pregathered_layers: int | Literal["all"] = 0,
    reduce_over_dp: ReduceOverDp = "each",
    view: View = "global",
    seed: int = 0,
    replicas: BringsStep | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    """Returns a jitted optimizer step. The state is donated.

    In global view `loss` is given global arrays: model and loss mean what they mean without a mesh, whatever they
    compute, and XLA shards what gtp_jax's own modules do not. The gradient is summed over replicas in each microbatch.
    In local view everything runs inside one `shard_map` over the whole mesh: `loss` is given a rank's own sequences and
    returns a sum over its tokens; gradients are added up over microbatches, and summed over replicas once. It is for
    models whose every operation is written for a rank's own part, such as `gtp_jax.models`.

    The optimizer runs outside, on global arrays of logical shapes: any optax optimizer will do.

    A step whose loss, or gradient of any parameter, is NaN or Inf on any device returns the state as it was, bit for
    bit: parameters, optimizer state, the model's other variables and the step count. A compiled program cannot raise,
    and a step does not wait for its own result; so `metrics["skipped"]` says it, and `gtp_jax.check_finite(metrics)`
    raises. It may be called steps later: what was launched meanwhile has used the old state, or, if it was given
    `skip=metrics["skipped"]` of the step before, has done nothing either.

    Args:
        loss: `(model, batch) -> loss`: a scalar, such as a mean; or (sum of token losses, number of tokens), two
            scalars, as `cross_entropy` returns them, so that neither microbatches nor masked tokens change what a token
            counts. The scalars of several microbatches are averaged. In local view it returns the latter.
        optimizer: any optax optimizer. Its update is passed `value`, the loss; `grad`, the gradients; and `value_fn`,
            with which a line search evaluates the loss of the batch, and its gradient, at other parameters. See
            `per_layer` for one that computes norms or products of whole parameters, if the model has a `Stack`.
        has_aux: whether `loss` returns `(loss, aux)`, as in `jax.value_and_grad`. Of several microbatches floats in
            `aux` are averaged, in float32 at least, and integers added. However many there are, floats come back in
            the dtype that the loss gave them, and integers in int32 at least. Not in local view.
        microbatches: parts of the batch, one after the other: number m is `batch[m::microbatches]`. Batch statistics
            are those of a microbatch, and variables that a model writes go from one to the next.
        max_grad_norm: scales gradients down to this global L2 norm.
        skip_nonfinite: leave out an update whose loss, or global L2 norm of gradients, is not finite; a norm that
            overflows counts. `False` for an optimizer that must see such gradients, as one that scales the loss does.
        recipe: what is quantized, such as `gtp_jax.NVFP4()`. The default is the recipe in scope (`use_recipe`) when the
            step is called, not when it is made: one step may be called under several recipes, each of which is
            compiled with its own XLA options.
        pregathered_layers: layers of each stack, or `"all"`, whose codes are gathered once a step, ahead of the
            microbatches, and reused in all their passes; the others gather in each. They are counted from the first
            that travels as codes, behind a recipe's `high_precision_first`. On every device that takes the bytes of
            these layers' codes whole, 0.504 an element in NVFP4. No number changes.
        reduce_over_dp: when gradients are summed over dp, or whichever axes the role `optimizer` names: `"each"`
            reduce-scatters those of every microbatch, under backward, and accumulates what this rank stores; `"last"`,
            in local view, accumulates whole shards, and reduce-scatters the sum of all microbatches once, behind them.
            With one microbatch both are the same program.
        view: `"global"` or `"local"`, see above.
        seed: of stochastic rounding, of which every step, microbatch and rank has its own bits.
        replicas: `gtp_jax.Replicas` of unequal tensor-parallel degree, for a run that goes on without some of its
            devices. The state is on `replicas.core`, the batch has the plan's number of rows, and the view is local:
            its losses are sums over sequences, which any replica may compute. The step is not traced as a whole: call
            it outside `jax.jit`. Of a plan without failures the step is that without `replicas`.
        compiler_options: XLA options, which win over those of `compile_options` for the mesh in scope.

    Returns:
        `step(state, batch, skip=None) -> (state, metrics)`. `batch` is a pytree of global arrays with the batch first,
        a multiple of `microbatches`, and of dp * gtp where a gtp_jax module meets it. `skip` is a bool scalar that
        leaves out the update in any case. Metrics are device scalars: `loss` (the mean over tokens, or over
        microbatches), `grad_norm`, `skipped` (whether the update was left out), `tokens` where `loss` counts them; and
        `aux`. XLA options are those for the mesh and the recipe in scope at the call.

    Raises:
        ValueError: if `microbatches` is less than 1, `view` or `reduce_over_dp` is another name, or the latter is
            `"last"` in global view; by `step`, if `microbatches` do not divide the batch, if codes are to be gathered
            ahead of a model that has none, or if in local view the model has variables other than parameters.
        TypeError: if `loss` is no function or `optimizer` none of optax; by `step`, if `loss` returns something else.
    """
    check_loss(loss)
    check_optimizer(optimizer)
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"`microbatches` is {microbatches!r}; it must be a whole number of at least 1.")
    if max_grad_norm is not None and not 0 < max_grad_norm < math.inf:
        raise ValueError(
            f"`max_grad_norm` is {brief(max_grad_norm)}; it must be a number above 0, or `None` for no limit."
        )
    check_recipe(recipe)
    _check_pregathered_layers(pregathered_layers)
    _check_view(view, has_aux)
    check_reduce_over_dp(reduce_over_dp, view, microbatches)
    request = Request(loss, view, has_aux, microbatches, recipe, pregathered_layers, seed, reduce_over_dp)

    def step(state: TrainState, batch: Tree, skip: jax.Array | None = None) -> tuple[TrainState, dict[str, Any]]:
        _check_state(state)
        chosen = request._replace(recipe=recipe_of_call(recipe))
        computed = gradients(chosen, state, batch)
        after, metrics = updated(
            state,
            computed,
            optimizer,
            max_grad_norm=max_grad_norm,
            skip_nonfinite=skip_nonfinite,
            skip=skip,
            compute=lambda params: gradients(chosen, dataclasses.replace(state, params=params), batch),
        )
        return after, {**_metrics(computed, state, view, has_aux), **metrics}

    options = lambda *args: _options(compiler_options, recipe_of_call(recipe), view, *args)  # noqa: E731
    limits: Any = {"max_grad_norm": max_grad_norm, "skip_nonfinite": skip_nonfinite}
    own = None if replicas is None else replicas.own_step(request, optimizer, **limits, options=options)
    return Jitted(step, options, donate_argnums=(0,), check=check_values) if own is None else own


def eval_step(
    loss: Loss,
    *,
    has_aux: bool = False,
    recipe: Recipe | None = None,
    view: View = "global",
    compiler_options: dict[str, Any] | None = None,
) -> Callable[[TrainState, Tree], dict[str, Any]]:
    """Returns a jitted evaluation: `(state, batch) -> metrics`, those of `train_step` without `grad_norm` and
    `skipped`.

    What a call writes to the model's variables is dropped. Dropout and batch statistics are as the loss function has
    them: call `model.eval()` in it for those of inference. Arguments as in `train_step`.
    """
    check_loss(loss)
    check_recipe(recipe)
    _check_view(view, has_aux)

    def step(state: TrainState, batch: Tree) -> dict[str, Any]:
        _check_state(state)
        computed = losses(Request(loss, view, has_aux, 1, recipe_of_call(recipe)), state, batch)
        return _metrics(computed, state, view, has_aux)

    options = lambda *args: _options(compiler_options, recipe_of_call(recipe), view, *args)  # noqa: E731
    return Jitted(step, options, check=check_values)


def loss_and_gradients(
    loss: Loss,
    state: TrainState,
    batch: Tree,
    *,
    microbatches: int = 1,
    recipe: Recipe | None = None,
    pregathered_layers: int | Literal["all"] = 0,
    reduce_over_dp: ReduceOverDp = "each",
    view: View = "global",
    seed: int = 0,
) -> tuple[jax.Array, Tree]:
    """Returns the loss of the batch, as `train_step` reports it, and its gradient with respect to `state.params`, for a
    step of one's own.

    Call it with the mesh in scope, and under `jax.jit`: outside it runs one operation after another. Arguments as in
    `train_step`. Gradients are rounded stochastically by bits that follow from `seed` and `state.step`: count the
    latter up after every update, or they will be rounded alike each time. What a call writes to the model's variables
    is dropped.

    Raises:
        ValueError: on arguments that `train_step` refuses; if a step has taken the state.
    """
    check_loss(loss)
    _check_state(state)
    check_values(state)
    check_recipe(recipe)
    _check_pregathered_layers(pregathered_layers)
    _check_view(view, has_aux=False)
    check_reduce_over_dp(reduce_over_dp, view, microbatches)
    chosen = recipe_of_call(recipe)
    request = Request(loss, view, False, microbatches, chosen, pregathered_layers, seed, reduce_over_dp)
    computed = gradients(request, state, batch)
    grads = mean_gradients(state.params, computed)
    return mean(computed.total, computed.tokens), grads


def _metrics(computed: Computed, state: TrainState, view: View, has_aux: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"loss": mean(computed.total, computed.tokens)}
    if computed.tokens is not None:
        roles = state.model_def.roles
        found["tokens"] = _token_count(computed.tokens, roles) if view == "local" else computed.tokens
    return {**found, "aux": computed.aux} if has_aux else found


def _check_view(view: Any, has_aux: bool) -> None:
    if view not in VIEWS:
        raise ValueError(f"`view` is {view!r}; it must be one of {', '.join(map(repr, VIEWS))}.")
    if has_aux and view == "local":
        raise ValueError(
            "`has_aux` is for `view='global'`: in local view every rank would return what it found in its own part."
        )


def _options(own: dict[str, Any] | None, recipe: Recipe | None, view: View, *args: Any) -> dict[str, Any]:
    kinds = () if recipe is None else recipe.kinds
    fp8 = any(kind.operands is not None and kind.operands.weight.block is None for kind in kinds)
    tensor = current_roles().tensor
    known = tensor in jax.sharding.get_abstract_mesh().axis_names  # a model may have other roles than those in scope
    units = [a.model_def.largest_unit for a in args if isinstance(a, TrainState) and view == "global"]
    return compile_options(
        platform(), own, tp=degree(tensor) if known else 1, fp8=fp8, largest_unit=max(units, default=0)
    )


def _check_state(state: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            f"a step takes a `TrainState`; got {type(state).__name__}. `gtp_jax.TrainState.create(model, optimizer)` "
            "makes one."
        )


def _check_pregathered_layers(pregathered_layers: Any) -> None:
    if pregathered_layers != "all" and (
        not isinstance(pregathered_layers, int) or isinstance(pregathered_layers, bool) or pregathered_layers < 0
    ):
        raise ValueError(
            f"`pregathered_layers` is {pregathered_layers!r}; it must be a number of layers, at least 0, or 'all'."
        )


def _token_count(tokens: jax.Array, roles: Roles) -> jax.Array:
    """Returns the tokens of the batch, from the sum over all ranks: those of an axis that does not shard it count
    again."""
    names = jax.sharding.get_abstract_mesh().axis_names
    return tokens / degrees(tuple(axis for axis in names if axis not in roles.batch))
