"""Provides what users call to train: `train_step` and `eval_step`, which make jitted functions, and
`loss_and_gradients`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
import numpy as np
import optax

from .._foreign import brief
from .._words import ReduceOverDp
from ..chain import stamped
from ..mesh import Roles, current_roles, degree, degrees, is_on_host, platform
from ..recipes import Phases, Recipe, recipe_at, recipe_of_call, recipes_of
from ._gradients import Computed, gradients, losses, mean_gradients
from ._jit import Jitted
from ._loss import Loss, mean
from ._memory import check_values
from ._optimizer import check_optimizer
from ._options import check_excess_precision, compile_options
from ._phased import Phased
from ._request import Request, View
from ._rows import check_numbers
from ._skips import Skips
from ._state import TrainState, check_state
from ._update import under_backward, updated

Tree = Any


class BringsStep(Protocol):
    """Devices whose step may differ from the program that runs on a single mesh, such as
    `gtp_jax.nonuniform.Replicas`."""

    def own_step(
        self,
        request: Request,
        optimizer: optax.GradientTransformation,
        *,
        max_grad_norm: float | None,
        skip_nonfinite: bool | Literal["loss"],
        options: Callable[[], dict[str, Any]],
    ) -> Callable[..., tuple[TrainState, dict[str, Any]]] | None:
        """Returns the step over these devices, or `None` if the usual step can run on them as a single mesh.

        Args:
            request: the arguments of `train_step` that decide what is computed, already checked.
            optimizer: any optax optimizer.
            max_grad_norm: the global L2 norm to which larger gradients are scaled down; `None` for no limit.
            skip_nonfinite: whether to skip an update if the loss or the norm of the gradients is not finite.
            options: a function that returns the XLA options for the mesh in scope and the recipe of the call.

        Raises:
            ValueError: if these devices cannot compute what is requested.
        """
        ...


def train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    microbatches: int = 1,
    max_grad_norm: float | None = None,
    skip_nonfinite: bool | Literal["loss"] = True,
    recipe: Recipe | Phases | None = None,
    pregathered_layers: int | Literal["all"] = 0,
    reduce_over_dp: ReduceOverDp = "each",
    view: View = "global",
    seed: int = 0,
    replicas: BringsStep | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    """Returns a jitted optimizer step, which donates its state.

    In global view `loss` gets global arrays. Model and loss mean the same as without a mesh, whatever they compute.
    gtp_jax's modules shard their own computation, and XLA shards the rest. Gradients are summed over replicas in each
    microbatch.

    In local view the loss and its gradients are computed inside one `shard_map` over the whole mesh. `loss` gets a
    rank's own sequences and returns a sum over their tokens. Gradients are accumulated over microbatches. They are
    summed over dp in each microbatch or once (see `reduce_over_dp`), and over other replicas once. Use this view only
    if every operation of the model is written for a rank's own part of the arrays, as in `gtp_jax.models`.

    The optimizer runs outside the `shard_map`, on global arrays, and its updates are those of arrays without padding.
    So any optax optimizer works.

    If the loss or a gradient is NaN or Inf on any device, and `skip_nonfinite` is true, the step returns the old state
    bit for bit: parameters, optimizer state, the model's other variables, the amaxes of delayed scaling and the step
    count. A compiled program cannot raise an error for this. Instead, `metrics["skipped"]` is true, and
    `gtp_jax.train.check_finite(metrics)` raises the error. `check_finite` waits for the step, so you may call it some
    steps later. The steps launched in the meantime used the old state; if they got `skip=metrics["skipped"]` of the
    step before them, they were skipped too. If ten steps in a row are skipped without a `skip`, a later step warns
    once.

    Args:
        loss: `(model, batch) -> loss`. It returns either one scalar, such as a mean, which is averaged over
            microbatches; or two scalars, (sum of token losses, number of tokens), as `cross_entropy` does. With two
            scalars each token has the same weight, however many microbatches or masked tokens there are. The number may
            not depend on parameters, unless `as_count` declares it. Local view requires two scalars.
        optimizer: any optax optimizer. Its update gets `value`, the loss; `grad`, the gradients; and `value_fn`, with
            which a line search evaluates the loss of the batch, and its gradient, at other parameters. If the model
            has a `Stack`, see `per_layer` for optimizers that compute norms or products of whole parameters.
        has_aux: whether `loss` returns `(loss, aux)`, as in `jax.value_and_grad`. Local view does not support it. Over
            several microbatches, floats in `aux` are averaged in at least float32, integers are added, and booleans are
            true if they are true in any microbatch. The step returns floats in the dtype that the loss gave them, and
            integers in at least int32.
        microbatches: the number of parts of the batch that run one after another; part m is `batch[m::microbatches]`.
            Batch statistics are computed per microbatch. What the model writes to its variables in one microbatch, it
            reads in the next.
        max_grad_norm: the global L2 norm to which larger gradients are scaled down; `None` for no limit.
        skip_nonfinite: whether to skip an update if its loss or the global L2 norm of its gradients is not finite,
            including a norm that overflows. Use `False` for an optimizer that must see such gradients, such as one that
            scales the loss. `"loss"` checks the loss only, which is known before backward: then updates of a state on
            the host (`offload`) need not wait for all gradients, and run under backward. A gradient that is not finite,
            although the loss is, reaches the state.
        recipe: what is quantized, such as `gtp_jax.NVFP4()`. By default, the recipe that is in scope (`use_recipe`)
            when the step is called; the one in scope when the step is made does not matter. One step may be called
            under several recipes; it is compiled for each with that recipe's XLA options. `gtp_jax.recipes.Phases`
            changes the recipe at given steps; each phase is traced before the first step, and compiled when it begins.
            `lower` then lowers the phase of its state.
        pregathered_layers: the number of layers of each stack that are gathered in advance, or `"all"`. Their codes
            (quantized weights) are gathered once per step, before the microbatches, and reused in all passes. The other
            layers are gathered in each pass. The count starts at the first layer that is sent as codes, after the
            layers that a recipe's `high_precision_first` leaves in high precision. Throughout the step, each device
            holds the gathered codes of these layers: 0.504 bytes per element in NVFP4. Results do not change.
        reduce_over_dp: when gradients are summed over dp, or over the axes that the role `optimizer` names. `"each"`
            reduce-scatters the gradients of every microbatch during backward, and accumulates only the part that this
            rank stores. `"last"` accumulates the gradients of whole shards, and reduce-scatters the sum once, after the
            last microbatch. With several microbatches, `"last"` requires local view. With one microbatch both are the
            same program.
        view: `"global"` or `"local"`, see above.
        seed: the seed of stochastic rounding, which uses different bits for every step, microbatch and rank; and of the
            dropout of adapters, which uses different bits for every step and microbatch (for ranks, see `lora`).
        replicas: `gtp_jax.nonuniform.Replicas`, for a run that continues without some of its devices, so that its
            replicas may have unequal tensor-parallel degrees. The state is on the mesh `replicas.core`, and the batch
            has `replicas.plan.batch` rows. If the replicas are unequal, the view must be local, because its losses are
            sums over sequences, which any replica can compute; and the step must be called outside `jax.jit`, because
            it consists of several programs. If they are equal, the step is the same as without `replicas`.
        compiler_options: XLA options, which take precedence over those that `compile_options` chooses.

    Returns:
        `step(state, batch, skip=None) -> (state, metrics)`. `batch` is a pytree of global arrays whose first dimension
        is the batch, a multiple of `microbatches`. In local view, and where examples pass through a
        `gtp_jax.nn.Layer`, the number of examples per microbatch must be a multiple of the number of ranks along the
        batch axes, by default dp * gtp. `skip` is a bool scalar; if it is true, the update is skipped in any case.
        Metrics are device scalars: `loss` (the mean over tokens, or over microbatches), `grad_norm` (before clipping),
        `skipped` (whether the update was skipped), `tokens` if `loss` counts them, and `expert_load` if routers have
        biases. With `has_aux` there is also `aux`, a pytree of arrays. XLA options are chosen for the mesh in scope and
        the recipe of the call.

    Raises:
        ValueError: if a number or a name is not one of those described above, if local view or `replicas` do not
            support an argument, or if `reduce_over_dp` is `"last"` in global view with several microbatches. By `step`,
            if the batch is empty or cannot be divided; if the state was donated, has no values, is of another optimizer
            or of other mesh degrees, or lacks the amaxes that delayed scaling needs; if the recipe does not fit the
            model, or XLA options would round the scales of `FP8Delayed`; if `pregathered_layers` is set without a
            recipe, or no stack has that many layers that are sent as codes; if the optimizer has a line search, and
            `max_grad_norm` is set or replicas are unequal; if `loss` returns a mean, but a `MoE` of the model was built
            for a sum, or the other way round, or a sum with a count of examples whose tokens such a `MoE` routes; if
            `loss` sets a parameter; if `loss` changes the shapes or dtypes of the model's variables, and the step has a
            mesh or several microbatches, or may be skipped; if the optimizer's update changes those of its state, or a
            `per_layer` in it refuses the update; or if in local view the model has variables that are neither
            parameters nor frozen.
        TypeError: if `loss` is not callable, `optimizer` is not an optax optimizer, or `recipe` is not a recipe. By
            `step`, if `state` is not a `TrainState`, if `batch` has text or other objects that are no numbers, if a
            parameter is an integer or boolean array, if `loss` returns anything other than described above, or if the
            optimizer's update requires an argument that a step does not have.
    """
    first = recipe_at(recipe, 0)
    request = Request(loss, view, has_aux, microbatches, first, pregathered_layers, seed, reduce_over_dp).checked()
    check_optimizer(optimizer)
    if max_grad_norm is not None and not (_is_number(max_grad_norm) and 0 < max_grad_norm < math.inf):
        raise ValueError(
            f"`max_grad_norm` is {brief(max_grad_norm)}; it must be a finite number above 0, or `None` for no limit."
        )
    if not (isinstance(skip_nonfinite, bool) or (isinstance(skip_nonfinite, str) and skip_nonfinite == "loss")):
        raise ValueError(
            f"`skip_nonfinite` is {brief(skip_nonfinite)}; it must be `True`, which checks the loss and all gradients, "
            "'loss', which checks only the loss, or `False`."
        )
    if replicas is not None and isinstance(recipe, Phases):
        raise ValueError(
            "`recipe` is a `Phases`, which a step over `replicas` does not support. Pass the recipe of one phase, and "
            "make another step when the next begins."
        )
    limits: Any = {"max_grad_norm": max_grad_norm, "skip_nonfinite": skip_nonfinite}
    skips = Skips()

    def after(args: tuple[Any, ...], result: tuple[TrainState, dict[str, Any]]) -> None:
        if skip_nonfinite and (len(args) == 2 or args[2] is None):
            skips.note(result[1]["skipped"], stacklevel=4 if not isinstance(recipe, Phases) else 5)

    def of(recipe: Recipe | None) -> Any:
        own_request = request._replace(recipe=recipe)
        if replicas is not None and recipe is not None and recipe.delays:
            raise ValueError(
                f"`recipe` is a {type(recipe).__name__} with delayed scaling, which a step over `replicas` does not "
                "support. Pass `gtp_jax.FP8(matmuls=True)`, which scales each operand by its own amax."
            )

        def step(state: TrainState, batch: Tree, skip: jax.Array | None = None) -> tuple[TrainState, dict[str, Any]]:
            check_state(state)
            chosen = own_request._replace(recipe=recipe_of_call(recipe))
            batch = stamped(batch, "at the beginning of a step")
            compute = lambda params: gradients(chosen, dataclasses.replace(state, params=params), batch)  # noqa: E731
            under = None
            if view == "local" and microbatches == 1:
                under = under_backward(
                    state, lambda state: losses(chosen, state, batch), optimizer, **limits, skip=skip, compute=compute
                )
            computed = gradients(chosen, state, batch, under)
            after, metrics = updated(
                state,
                computed,
                optimizer,
                **limits,
                skip=skip,
                recipe=chosen.recipe,
                compute=compute,
                under=under,
            )
            return after, {**_metrics(computed, state, view, has_aux), **metrics}

        options = lambda *args: _options(compiler_options, recipe_of_call(recipe), view, *args)  # noqa: E731
        own = None if replicas is None else replicas.own_step(own_request, optimizer, **limits, options=options)
        if own is not None:
            return own
        of_step: Any = {"check": _check_arguments, "kept": lambda result: result[1], "after": after}
        return Jitted(step, options, donate_argnums=(0,), **of_step)

    return Phased(recipe, map(of, recipes_of(recipe))) if isinstance(recipe, Phases) else of(recipe)


def eval_step(
    loss: Loss,
    *,
    has_aux: bool = False,
    recipe: Recipe | Phases | None = None,
    view: View = "global",
    compiler_options: dict[str, Any] | None = None,
) -> Callable[[TrainState, Tree], dict[str, Any]]:
    """Returns a jitted evaluation `(state, batch) -> metrics`.

    The arguments are those of `train_step`. So are the metrics, except that those of the update are missing
    (`grad_norm`, `skipped` and `expert_load`). What the model writes to its variables is discarded. The evaluation
    switches off only the dropout of adapters; call `model.eval()` in the loss function to switch off other dropout and
    the use of batch statistics.

    Raises:
        ValueError: if `view` is an unknown name, or `has_aux` is used in local view. By the evaluation, if the batch is
            empty or cannot be divided; if the state was donated, has no values, is of other mesh degrees, or lacks the
            amaxes that delayed scaling needs; if the recipe does not fit the model, or XLA options would round the
            scales of `FP8Delayed`; if `loss` sets a parameter; or if in local view the model has variables that are
            neither parameters nor frozen.
        TypeError: if `loss` is not callable or `recipe` is not a recipe. By the evaluation, if `state` is not a
            `TrainState`, or if `loss` returns anything other than `train_step` allows.
    """

    def of(recipe: Recipe | None) -> Any:
        request = Request(loss, view, has_aux, 1, recipe).checked()

        def step(state: TrainState, batch: Tree) -> dict[str, Any]:
            check_state(state)
            computed = losses(request._replace(recipe=recipe_of_call(recipe)), state, batch)
            return _metrics(computed, state, view, has_aux)

        options = lambda *args: _options(compiler_options, recipe_of_call(recipe), view, *args)  # noqa: E731
        return Jitted(step, options, check=_check_arguments)

    return Phased(recipe, map(of, recipes_of(recipe))) if isinstance(recipe, Phases) else of(recipe)


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
    """Returns the loss of a batch and its gradient with respect to `state.params`, for a step that you write yourself.

    The loss is the one that `train_step` reports, and the arguments are those of `train_step`. Call this with the mesh
    in scope and under `jax.jit`; outside `jax.jit` operations run one by one. The random bits of stochastic rounding
    and of adapters' dropout depend on `seed` and `state.step`: increment `state.step` after every update, or every step
    will use the same bits. What the model writes to its variables is discarded. If a weight is stored padded (see
    `even_shares`), its gradient is padded with zeros. Your step must then update each element by itself, as AdamW does;
    a mean over the array, for example, would count the padding.

    Raises:
        ValueError: if `microbatches`, `view`, `reduce_over_dp` or `pregathered_layers` has a value that `train_step`
            would refuse; if the recipe has delayed scaling or does not fit the model; if the state was donated to a
            step, has no values or is of other mesh degrees; if the batch is empty or cannot be divided; if `loss`
            returns a mean, but a `MoE` of the model was built for a sum, or the other way round; if `loss` sets a
            parameter; if there are several microbatches, and `loss` changes the shapes or dtypes of the model's
            variables; or if in local view the model has variables that are neither parameters nor frozen.
        TypeError: if `loss` is not callable, `state` is not a `TrainState`, `recipe` is not a recipe, a parameter is an
            integer or boolean array, or `loss` returns anything other than `train_step` allows.
    """
    request = Request(loss, view, False, microbatches, recipe, pregathered_layers, seed, reduce_over_dp).checked()
    check_state(state)
    check_values(state)
    chosen = recipe_of_call(recipe)
    if chosen is not None and chosen.delays:
        raise ValueError(
            f"`recipe` is a {type(chosen).__name__} with delayed scaling, whose amaxes `loss_and_gradients` would "
            "lose, because it returns no state. Train with `gtp_jax.train_step`, or pass `gtp_jax.FP8(matmuls=True)`, "
            "which scales each operand by its own amax."
        )
    computed = gradients(request._replace(recipe=chosen), state, batch)
    grads = mean_gradients(state.params, computed)
    return mean(computed.total, computed.tokens), grads


def _check_arguments(state: Any, batch: Tree, *_: Any) -> None:
    check_values(state)
    check_numbers(batch)


def _metrics(computed: Computed, state: TrainState, view: View, has_aux: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"loss": mean(computed.total, computed.tokens)}
    if computed.tokens is not None:
        roles = state.model_def.roles
        found["tokens"] = _token_count(computed.tokens, roles) if view == "local" else computed.tokens
    return {**found, "aux": computed.aux} if has_aux else found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _options(own: dict[str, Any] | None, recipe: Recipe | None, view: View, *args: Any) -> dict[str, Any]:
    kinds = () if recipe is None else recipe.kinds
    operands = [kind.operands for kind in kinds if kind.operands is not None]
    if platform() == "gpu" and any(each.delayed is not None for each in operands):
        check_excess_precision(own or {})
    fp8 = any(each.weight.block is None for each in operands)
    tensor = current_roles().tensor
    known = tensor in jax.sharding.get_abstract_mesh().axis_names  # the roles in scope may not be those of the model
    units = [a.model_def.largest_unit for a in args if isinstance(a, TrainState) and view == "global"]
    copies = any(map(is_on_host, jax.tree.leaves(args)))
    return compile_options(
        platform(), own, tp=degree(tensor) if known else 1, fp8=fp8, largest_unit=max(units, default=0), copies=copies
    )


def _token_count(tokens: jax.Array, roles: Roles) -> jax.Array:
    """Returns the number of tokens in the batch, given the sum of all ranks' numbers.

    The ranks along an axis that does not divide tokens have the same tokens, so the sum counts each token several
    times.
    """
    names = jax.sharding.get_abstract_mesh().axis_names
    return tokens / degrees(tuple(axis for axis in names if axis not in roles.tokens))
