"""Computes losses and gradients over the mesh in scope, on global arrays or on each rank's own part.

In global view a loss gets global arrays, and XLA partitions what gtp_jax's modules do not. In local view a loss runs
inside a `shard_map`, and gets the part of the batch that one rank holds.

In this package, "the optimizer's axes" are the mesh axes that the role `optimizer` names, by default dp. They divide
weights only in storage (ZeRO): each rank gathers its whole shard over them before it computes. "Codes" are quantized
weights. An "amax" is the largest magnitude in a tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..collectives import sum_over_replicas
from ..experts import check_loss_reduction, routed_into
from ..hook import quantized, recipe_of_step, with_made
from ..mesh import Path, degrees, on_device, use_roles, with_paths
from ..nn import groups_of, keys_of, shards_of, with_dropout, with_groups
from ..weights import ModulePath, forget_after, prepare
from ._batch import microbatches_of, shard_batch, split_microbatches
from ._count import refuse_examples, refuse_metric
from ._evaluation import Evaluation
from ._known_at import Piece, pieces_of_all
from ._loss import Returned, evaluate, mean, wide
from ._microbatch_keys import keys_of_microbatch
from ._microbatches import as_stored, over_microbatches
from ._needs import numbered
from ._on_ranks import over_all_ranks, over_mesh
from ._request import Request
from ._rows import check_arrays, check_filled, check_parts, check_rows
from ._scaling import amaxes_in_use, over_ranks, scaling_of, slots_of
from ._state import TrainState, constrained
from ._state_form import check_form_kept
from ._streamed import streams
from ._uncast import trace_uncast, uncast
from ._under_backward import UnderBackward
from ._writes import without_writes
from ._zero import placeholders, sum_shards

Tree = Any


class Computed(NamedTuple):
    """The loss and the gradients of a whole batch.

    Attributes:
        total: the loss: a mean over microbatches, or a sum over tokens.
        tokens: the number of tokens if `total` is a sum, otherwise `None`. In local view, both are sums over all ranks
            of the mesh. The ranks along an axis that does not shard the batch have the same tokens, and count each of
            them again. Both sums grow by the same factor, so `total / tokens` is still the mean.
        gradients: the gradients of `total` with respect to the parameters. Each has the dtype of its parameter, or a
            narrower one that holds the same values (see `uncast`). `()` if only the loss was computed.
        model_state: the model's variables that are neither parameters nor frozen, after the last microbatch; empty in
            local view, which supports no such variables, and if only the loss was computed.
        aux: the `aux` of the loss function; `()` if there is none.
        amaxes: for each module with delayed scaling, by path: the amaxes of its input and of the gradient of its
            output, `(*layers, 2)`. Empty if only the loss was computed.
        pieces: for each parameter, by path: the pieces of its gradient, and when backward knows each. Empty if no part
            of the state is on the host; and if there are several microbatches, because then all are known at the end.
        moved: the arrays that were updated under backward, of each parameter; see `UnderBackward`.
    """

    total: jax.Array
    tokens: jax.Array | None
    gradients: Tree
    model_state: Tree
    aux: Tree
    amaxes: Mapping[ModulePath, jax.Array] = {}
    pieces: Mapping[Path, tuple[Piece, ...]] = {}
    moved: list[list[jax.Array]] | None = None


def in_dtypes_of(params: Tree, gradients: Tree) -> Tree:
    """Casts gradients to the dtypes of their parameters."""
    return jax.tree.map(lambda p, g: g.astype(p.dtype), params, gradients)


def mean_gradients(params: Tree, computed: Computed) -> Tree:
    """Returns the gradients of the mean loss, in the dtypes of their parameters."""
    wide = in_dtypes_of(params, computed.gradients)
    return jax.tree.map(lambda g: mean(g, computed.tokens), wide)


def gradients(request: Request, state: TrainState, batch: Tree, under: UnderBackward | None = None) -> Computed:
    """Returns the loss and the gradients of a batch, in the view of the request.

    Args:
        request: the request.
        state: the state.
        batch: the batch.
        under: an update that is computed under backward; only in local view, with one microbatch.

    Raises:
        ValueError: if an array in the batch is empty; if the batch cannot be split as requested; if the model was built
            for other mesh degrees; if layers are to be gathered in advance without a recipe, or more layers than any
            stack sends as codes; if the recipe does not fit the model; if the state lacks the amaxes that delayed
            scaling needs; if a `MoE` of the model was built for the other kind of loss; if the loss sets a parameter;
            if there are several microbatches, and the loss changes the shapes or dtypes of the model's variables; or if
            in local view the model has variables that are neither parameters nor frozen.
        TypeError: if a parameter is an integer or boolean array, or if the loss function returns the wrong kind of
            result.
    """
    check_filled(batch)
    away = streams(state.params, state.opt_state)
    state = _arrived(state)
    _check_parameters_have_gradients(state)
    _check_recipe_pregathers(request)
    with recipe_of_step(request.recipe):
        if request.view == "global":
            return _on_global_arrays(request, state, batch, away)
        return _on_each_rank(request, state, batch, away, under)


def losses(request: Request, state: TrainState, batch: Tree) -> Computed:
    """Returns the loss of a batch, without gradients. Discards what the model writes to its variables.

    Raises:
        ValueError: if an array in the batch is empty; if the model was built for other mesh degrees; if the recipe does
            not fit the model; if the state lacks the amaxes that delayed scaling needs; if the loss sets a parameter;
            or, in local view, if the batch holds a scalar or a list of numbers, or cannot be divided among ranks, or if
            the model has variables that are neither parameters nor frozen.
        TypeError: if the loss function returns the wrong kind of result.
    """
    check_filled(batch)
    with recipe_of_step(request.recipe):
        return _losses(request, _arrived(state), batch)


def _arrived(state: TrainState) -> TrainState:
    """Returns the state with all parameters in the memory of the device."""
    return dataclasses.replace(state, params=on_device(state.params))


def _losses(request: Request, state: TrainState, batch: Tree) -> Computed:
    if request.view == "global":
        model_def = state.model_def
        model_def.check_mesh()
        with use_roles(model_def.roles):
            model_of, sharded = _model_of(request, state), shard_batch(batch, model_def.roles)

            @forget_after()
            def one(params: Tree, before: Tree) -> tuple[Returned, Tree]:
                model, returned = _called(request, lambda: model_of(params, before), sharded)
                return returned, model_def.state_of(model)

            returned, _ = one(state.params, state.model_state)
            if returned.tokens is not None:
                _refuse_metric(one, model_of, state.params, state.model_state)
        return Computed(returned.total, returned.tokens, (), (), returned.aux)

    def local(params: Tree, frozen: Tree, scaling: Tree, batch: Tree, *_: Any) -> Tree:
        model_of = _model_of(request, dataclasses.replace(state, params=params, frozen=frozen, scaling=scaling))

        @forget_after()
        def one(params: Tree, before: Tree) -> tuple[Returned, Tree]:
            return _sums(_called(request, lambda: model_of(params, before), batch)[1]), {}

        returned, _ = one(params, {})
        _refuse_metric(one, model_of, params, {})
        return over_all_ranks((returned.total, returned.tokens))

    total, tokens = over_mesh(local, request.loss, state, 1, PartitionSpec())(batch)
    return Computed(total, tokens, (), (), ())


def _on_global_arrays(request: Request, state: TrainState, batch: Tree, away: bool) -> Computed:
    """Differentiates the loss of global arrays, on which the model and the loss mean the same as without a mesh. `away`
    says whether a part of the state is on the host."""
    model_def, count = state.model_def, request.microbatches
    routed: list[tuple[int, int]] = []
    pieces: dict[Path, tuple[Piece, ...]] = {}
    model_def.check_mesh()
    with use_roles(model_def.roles), routed_into(routed):
        model_of = _model_of(request, state)

        def check_count(closed: Any, number: int | None, params: Tree, variables: tuple[Tree, Tree]) -> None:
            refuse_metric(closed, number, params, variables, model_of.made)
            refuse_examples(closed, number, routed, degrees(model_def.roles.batch))

        @forget_after()
        def one(
            params: Tree, slots: Tree, model_state: Tree, part: Tree, number: Any
        ) -> tuple[jax.Array, tuple[Any, Tree, Tree]]:
            keys = keys_of_microbatch(request, state, number)
            model, returned = _called(request, lambda: model_of(params, model_state, *keys, slots), part)
            check_loss_reduction(model, "mean" if returned.tokens is None else "sum")
            after = model_def.state_of(model)
            if count > 1:  # the loop over microbatches carries `model_state`
                check_form_kept(model_state, after)
                _check_addable(returned.aux)
            return returned.total, (returned.tokens, after, returned.aux)

        value_and_grad, slots = jax.value_and_grad(one, argnums=(0, 1), has_aux=True), model_of.slots()
        if count == 1:
            sharded = shard_batch(batch, model_def.roles)

            def whole(params: Tree, slots: Tree, before: Tree, batch: Tree) -> tuple[Tree, tuple[Any, Tree]]:
                returned, (found, amaxes) = value_and_grad(params, slots, before, batch, 0)
                return found, (returned, amaxes)

            def examine(closed: Any, inputs: Tree, outputs: Tree) -> None:
                (params, _, before, _), (found, ((_, (number, after, _)), _)) = inputs, outputs
                if away:
                    pieces.update(pieces_of_all(closed, found))
                check_count(closed, number, params, (before, after))

            found, ((total, (tokens, after, aux)), amaxes) = uncast(whole, examine)(
                state.params, slots, state.model_state, sharded
            )
            return Computed(total, tokens, found, after, aux, over_ranks(amaxes), pieces)

        check_arrays(batch)
        check_rows(batch)
        check_parts(batch, count, "microbatches")
        parts = jax.tree_util.tree_map_with_path(
            lambda path, a: microbatches_of(path, a, count, model_def.roles), batch
        )

        def of_part(carried: tuple[Tree, Tree], part: Tree, number: jax.Array) -> tuple[Tree, tuple[Tree, Tree]]:
            before, amaxes = carried
            (total, (tokens, after, aux)), (found, more) = value_and_grad(
                as_stored(state.params, number), slots, before, part, number
            )
            return found, ((total, tokens, aux), (after, jax.tree.map(jnp.maximum, amaxes, more)))

        def examine_part(closed: Any, inputs: Tree, outputs: Tree) -> None:
            ((before, _), *_), (_, ((_, number, _), (after, _))) = inputs, outputs
            check_count(closed, number, (), (before, after))

        found, (total, tokens, aux), (after, amaxes), (_, _, own) = over_microbatches(
            of_part,
            (state.model_state, slots),
            parts,
            addends=lambda others: (*others[:2], jax.tree.map(wide, others[2])),
            placed=lambda gradients: constrained(gradients, model_def.specs),
            examine=examine_part,
        )
        amaxes = over_ranks(amaxes)
    aux = jax.tree.map(lambda a, own: (a / count).astype(own.dtype) if _is_inexact(a) else a, aux, own)
    if tokens is None:
        total, found = jax.tree.map(lambda a: a / count, (total, found))
    return Computed(total, tokens, found, after, aux, amaxes)


def _on_each_rank(
    request: Request, state: TrainState, batch: Tree, away: bool, under: UnderBackward | None
) -> Computed:
    """Differentiates the sum of all ranks' losses in one `shard_map`. Each rank computes the loss of its own part of
    the batch. Without a mesh, there is one part and no `shard_map`. `away` says whether a part of the state is on the
    host, and `under` is updated under backward."""
    model_def, microbatches = state.model_def, request.microbatches
    last = request.reduce_over_dp == "last" and microbatches > 1
    routed: list[tuple[int, int]] = []
    pieces: dict[Path, tuple[Piece, ...]] = {}

    def local(params: Tree, frozen: Tree, scaling: Tree, batch: Tree, step: jax.Array):
        own = dataclasses.replace(state, params=params, frozen=frozen, scaling=scaling, step=step)
        model_of = _model_of(request, own, whole_gradients=last)
        params = placeholders(params, model_def.layouts) if last else params

        @forget_after()
        def one(params: Tree, slots: Tree, part: Tree, number: jax.Array | int):
            keys = keys_of_microbatch(request, own, number, of_rank=True)
            model, returned = _called(request, lambda: model_of(params, {}, *keys, slots), part)
            returned = _sums(returned)
            check_loss_reduction(model, "sum")
            return returned.total, returned.tokens

        value_and_grad, slots = jax.value_and_grad(one, argnums=(0, 1), has_aux=True), model_of.slots()
        if microbatches == 1:
            (total, tokens), (found, amaxes) = value_and_grad(params, slots, batch, 0)
        else:
            parts = jax.tree.map(lambda a: split_microbatches(a, microbatches), batch)

            def of_part(amaxes: Tree, part: Tree, number: jax.Array) -> tuple[Tree, tuple[Tree, Tree]]:
                sums, (found, more) = value_and_grad(as_stored(params, number), slots, part, number)
                return found, (sums, jax.tree.map(jnp.maximum, amaxes, more))

            def examine_part(closed: Any, _: Tree, outputs: Tree) -> None:
                refuse_examples(closed, outputs[1][0][1], routed, 1)

            found, (total, tokens), amaxes, _ = over_microbatches(of_part, slots, parts, examine=examine_part)
        found = sum_shards(found, model_def.layouts) if last else found
        found = sum_over_replicas(found, model_def.specs)
        return found, (*over_all_ranks((total, tokens)), over_ranks(amaxes))

    def examine(closed: Any, inputs: Tree, outputs: Tree) -> None:
        (params, *_), (found, (_, number, _)) = inputs, outputs
        if away:
            pieces.update(pieces_of_all(closed, found))
        refuse_metric(closed, number, params, ({}, {}))
        refuse_examples(closed, number, routed, degrees(jax.sharding.get_abstract_mesh().axis_names))

    def run(*args: Any) -> tuple[Tree, Tree, list[list[jax.Array]] | None]:
        *own, inputs = args
        if under is None:
            return *uncast(local, examine)(*own), None
        closed, shapes = trace_uncast(local, *own, examine=examine)
        evaluation, structure = Evaluation(closed, jax.tree.leaves(own)), jax.tree.structure(shapes)
        found, (total, tokens, _) = jax.tree.unflatten(structure, evaluation.outvars)
        moved = under.run(evaluation, dict(with_paths(found)), total, tokens, inputs)
        return *jax.tree.unflatten(structure, evaluation.results()), moved

    more = ((), ()) if under is None else (under.inputs, under.specs)
    out = (model_def.specs, PartitionSpec(), None if under is None else under.update.specs())
    with routed_into(routed):
        found, (total, tokens, amaxes), moved = over_mesh(run, request.loss, state, microbatches, out, more)(batch)
    return Computed(total, tokens, found, {}, (), amaxes, pieces, moved)


def _called(request: Request, make: Callable[[], Any], batch: Tree) -> tuple[Any, Returned]:
    """Returns the model that `make` makes, after the loss of a batch has been computed with it, and what the loss
    returned. Refuses a loss that writes a parameter; see `without_writes`."""
    return without_writes(make, lambda model: evaluate(request.loss, model, batch, has_aux=request.has_aux))


class _ModelOf(NamedTuple):
    """A function `(params, model_state, key, dropout, slots) -> model` that makes the model of a microbatch.

    `key` is the key of stochastic rounding and `dropout` the key of adapters' dropout; either may be `None`. `slots`
    are the arrays whose gradients are amaxes, as `slots_of` returns them.

    Attributes:
        make: the function.
        amaxes: for each module with delayed scaling, by path: the amaxes that set its scales in this step.
        made: the parameters, and what was made of them for all microbatches, such as codes.
    """

    make: Callable[..., Any]
    amaxes: Mapping[ModulePath, jax.Array]
    made: list[Any]

    def __call__(
        self,
        params: Tree,
        model_state: Tree,
        key: jax.Array | None = None,
        dropout: jax.Array | None = None,
        slots: Tree | None = None,
    ) -> Any:
        return self.make(params, model_state, key, dropout, self.slots() if slots is None else slots)

    def slots(self) -> dict[ModulePath, jax.Array]:
        """Returns the arrays whose gradients are the amaxes of a call."""
        return slots_of(self.amaxes)


def _model_of(request: Request, state: TrainState, *, whole_gradients: bool = False) -> _ModelOf:
    """Returns a function that makes the model of a microbatch.

    First quantizes the weights that the recipe quantizes, and gathers those that the optimizer's axes divide, so that
    all microbatches share the results.

    Args:
        request: the request, with or without a recipe.
        state: the state of the model; in local view, with this rank's part of its parameters and frozen weights.
        whole_gradients: whether backward returns the gradients of whole shards, not yet summed over the optimizer's
            axes. The function then takes `placeholders` as its `params`.
    """
    model_def = state.model_def
    model = model_def.model(state.params, state.model_state, state.frozen)
    groups = groups_of(model, request.recipe)
    amaxes = amaxes_in_use(state.scaling, model, request.recipe)

    def plain_model(params: Tree, model_state: Tree, dropout: jax.Array | None) -> Any:
        model = model_def.model(params, model_state, state.frozen)
        return model if dropout is None else with_dropout(model, dropout)

    held = jax.tree.leaves(state.params)
    if request.recipe is None and not request.rounded and not any(group.divided for group in groups.values()):
        plain = lambda params, model_state, key, dropout, slots: plain_model(params, model_state, dropout)  # noqa: E731
        return _ModelOf(plain, {}, held)
    stored = lax.stop_gradient(shards_of(model))
    of_weights = {path: own[..., 1] for path, own in amaxes.items()}
    prepared = prepare(groups, stored, request.pregathered_layers, request.rounded, of_weights)
    codes = quantized(model, of_weights)  # the codes of the weights that `gtp_jax.shard` has sharded
    decided = {at: group.of_shards for at, group in groups.items()} if whole_gradients else groups

    def make(params: Tree, model_state: Tree, key: jax.Array | None, dropout: jax.Array | None, slots: Tree) -> Any:
        keys = None if key is None else keys_of(key, groups)
        model = plain_model(params, model_state, dropout)
        scaling = scaling_of(amaxes, slots)
        model = with_made(model, codes, key, scaling)
        return with_groups(
            model,
            decided,
            prepared,
            keys,
            scaling=scaling,
            placeholders=whole_gradients,
            rounded=request.rounded,
        )

    return _ModelOf(make, amaxes, [*held, *jax.tree.leaves((prepared, codes))])


def _refuse_metric(one: Callable[..., tuple[Returned, Tree]], model_of: _ModelOf, params: Tree, before: Tree) -> None:
    """Refuses a loss that is only evaluated, and whose count depends on parameters; see `refuse_metric`.

    Args:
        one: `(params, variables) -> (returned, variables)`, the loss of the batch. It is traced but not run.
        model_of: what makes the model of `one`.
        params: the parameters.
        before: the other variables of the model.
    """
    closed, shapes = jax.make_jaxpr(one, return_shape=True)(params, before)
    of_params, of_variables = numbered((params, before))
    returned, after = numbered(shapes)
    refuse_metric(closed, returned.tokens, of_params, (of_variables, after), model_of.made)


def _sums(returned: Returned) -> Returned:
    """Returns its argument, a sum over tokens. Refuses a mean, because in local view it would be the mean over the
    tokens of one rank.

    Raises:
        TypeError: if the loss returned one scalar, without a number of tokens.
    """
    if returned.tokens is None:
        raise TypeError(
            "in `view='local'` a loss must return two scalars, (sum of token losses, number of tokens), of the "
            "sequences it is given; it returned one scalar, which would be the mean of one rank. Return both, as "
            "`gtp_jax.cross_entropy(logits, targets)` does, or use `view='global'`."
        )
    return returned


def _check_parameters_have_gradients(state: TrainState) -> None:
    """Refuses integer and boolean parameters, which have no gradient.

    Raises:
        TypeError: if there is one; the message names the first.
    """
    for path, parameter in with_paths(state.params):
        if not _is_inexact(parameter):
            raise TypeError(
                f"the parameter {'.'.join(path)} is {parameter.dtype}, which has no gradient. Hold it in a subclass of "
                "`nnx.Variable` other than `nnx.Param`: a step keeps these and does not train them."
            )


def _check_recipe_pregathers(request: Request) -> None:
    if request.pregathered_layers and request.recipe is None:
        raise ValueError(
            f"`pregathered_layers` is {request.pregathered_layers!r}, but without a recipe there are no codes to "
            "gather in advance: no recipe was passed, and none is in scope at the call. Pass a recipe, such as "
            "`gtp_jax.NVFP4()`, call the step under `use_recipe`, or pass `pregathered_layers=0`."
        )


def _check_addable(aux: Tree) -> None:
    """Refuses `aux` values that cannot be summed over microbatches.

    Raises:
        TypeError: if a leaf is neither a number nor a boolean; the message names it.
    """
    for path, value in jax.tree_util.tree_leaves_with_path(aux):
        if not (jnp.issubdtype(value.dtype, jnp.number) or value.dtype == jnp.bool_):
            raise TypeError(
                f"`aux`{jax.tree_util.keystr(path)} is {value.dtype}, which cannot be summed over microbatches. "
                "Return numbers, such as `jax.random.key_data(key)`, or leave it out."
            )


def _is_inexact(value: jax.Array) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)
