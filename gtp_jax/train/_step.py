"""One optimizer step, and one evaluation, over the mesh in scope."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..collectives import sum_over_replicas
from ..mesh import Roles, current_roles, degree, degrees, platform, use_roles
from ..nn import ModelDef, shards_of, structure_of, with_groups
from ..recipes import Recipe, check_recipe, current_recipe
from ..weights import join_stored, of_shards, quantize, resolve
from ._options import compile_options
from ._rounding import rounding_key
from ._state import TrainState, state_specs
from ._zero import ReduceOverDp, as_shards, check_reduce_over_dp, sum_shards

Tree = Any
Loss = Callable[[Any, Tree], tuple[jax.Array, jax.Array]]


def train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    max_grad_norm: float | None = None,
    recipe: Recipe | None = None,
    pregathered_layers: int | Literal["all"] = 0,
    reduce_over_dp: ReduceOverDp = "each",
    compiler_options: dict[str, Any] | None = None,
) -> Callable[[TrainState, Tree], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns a jitted optimizer step. The state is donated.

    The loss and its gradient run inside one `shard_map` over the whole mesh: every rank takes its own sequences, in
    `microbatches` parts (number m is `batch[m::microbatches]`), and adds up gradients of shards, in the parameters'
    dtype. The sum is then divided by the number of tokens in the whole batch, so that neither microbatches, nor ranks,
    nor masked tokens change what a token counts. The optimizer runs outside, on global arrays of logical shapes: any
    optax optimizer will do.

    Args:
        loss: `(model, batch) -> (sum of token losses, number of tokens)`, both scalars, of the sequences it is given;
            `cross_entropy` returns just that. The model is in local view.
        optimizer: any optax optimizer.
        microbatches: parts of a rank's batch, one after the other.
        max_grad_norm: scales gradients down to this global L2 norm.
        recipe: what is quantized, such as `gtp_jax.NVFP4()`; by default what the recipe in scope says, if there is one
            (`use_recipe`).
        pregathered_layers: layers of each stack, or `"all"`, whose codes are gathered once a step, ahead of the
            microbatches, and reused in all their passes; the others gather in each. They are counted from the first
            that travels as codes, behind a recipe's `high_precision_first`. On every device that takes the bytes of
            these layers' codes whole, 0.504 an element in NVFP4. No number changes.
        reduce_over_dp: when gradients are summed over dp, or whichever axes the role `optimizer` names: `"each"`
            reduce-scatters those of every microbatch, under backward, and accumulates what this rank stores; `"last"`
            accumulates whole shards, and reduce-scatters the sum of all microbatches once, behind them. With one
            microbatch both are the same program.
        compiler_options: XLA options, which win over those of `compile_options` for the mesh in scope.

    Returns:
        `step(state, batch) -> (state, metrics)`. `batch` is a pytree of global arrays with the batch first, a multiple
        of dp * gtp * microbatches. Metrics are device scalars: `loss` (mean over tokens), `tokens`, `grad_norm`.

    Raises:
        ValueError: if `microbatches` is less than 1 or `reduce_over_dp` is another name; by `step`, if `microbatches`
            does not divide the batch, or if codes are to be gathered ahead of a model that has none.
        TypeError: by `step`, if `loss` returns anything but two scalars.
    """
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"`microbatches` is {microbatches!r}; it must be a whole number of at least 1.")
    if max_grad_norm is not None and not 0 < max_grad_norm < math.inf:
        raise ValueError(f"`max_grad_norm` is {max_grad_norm}; it must be a number above 0, or `None` for no limit.")
    check_recipe(recipe)
    _check_pregathered_layers(pregathered_layers, recipe)
    check_reduce_over_dp(reduce_over_dp)

    def step(state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, jax.Array]]:
        _check_state(state)
        total, tokens, gradients = _gradients(
            loss, state, batch, microbatches, recipe, pregathered_layers, reduce_over_dp
        )
        gradients = jax.tree.map(lambda g: _mean(g, tokens), gradients)
        norm = optax.tree.norm(gradients)
        if max_grad_norm is not None:
            scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
            gradients = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        after = TrainState(params, opt_state, state.step + 1, state.model_def)  # pyright: ignore[reportArgumentType]
        specs = state_specs(state.model_def, optimizer, state.params)
        return _place(after, specs), {
            "loss": _mean(total, tokens),
            "tokens": _token_count(tokens, state.model_def.roles),
            "grad_norm": norm,
        }

    return jax.jit(step, donate_argnums=0, compiler_options=_options(compiler_options, recipe))


def eval_step(
    loss: Loss, *, recipe: Recipe | None = None, compiler_options: dict[str, Any] | None = None
) -> Callable[[TrainState, Tree], dict[str, jax.Array]]:
    """Returns a jitted evaluation: `(state, batch) -> {"loss", "tokens"}`, the mean loss over the batch's tokens.

    Arguments as in `train_step`.
    """
    check_recipe(recipe)

    def step(state: TrainState, batch: Tree) -> dict[str, jax.Array]:
        _check_state(state)
        chosen = current_recipe() if recipe is None else recipe

        def local(params: Tree, batch: Tree, _: jax.Array) -> tuple[jax.Array, jax.Array]:
            total, tokens = _checked(loss, _model_of(state.model_def, params, chosen)(params), batch)
            return _over_all_ranks((total, tokens))

        on_mesh = _over_mesh(local, state.model_def, 1, (PartitionSpec(), PartitionSpec()))
        total, tokens = on_mesh(state.params, batch, state.step)
        return {"loss": _mean(total, tokens), "tokens": _token_count(tokens, state.model_def.roles)}

    return jax.jit(step, compiler_options=_options(compiler_options, recipe))


def loss_and_gradients(
    loss: Loss,
    state: TrainState,
    batch: Tree,
    *,
    microbatches: int = 1,
    recipe: Recipe | None = None,
    pregathered_layers: int | Literal["all"] = 0,
    reduce_over_dp: ReduceOverDp = "each",
) -> tuple[jax.Array, Tree]:
    """Returns the mean loss over the batch's tokens and its gradient with respect to `state.params`, for a step of
    one's own.

    Call it under `jax.jit`, with the mesh in scope. Arguments as in `train_step`. Gradients are rounded stochastically
    by bits that follow from `state.step`: count it up after every update, or they will be rounded alike each time.
    """
    _check_state(state)
    check_recipe(recipe)
    _check_pregathered_layers(pregathered_layers, recipe)
    check_reduce_over_dp(reduce_over_dp)
    total, tokens, gradients = _gradients(loss, state, batch, microbatches, recipe, pregathered_layers, reduce_over_dp)
    return _mean(total, tokens), jax.tree.map(lambda g: _mean(g, tokens), gradients)


def _gradients(
    loss: Loss,
    state: TrainState,
    batch: Tree,
    microbatches: int,
    recipe: Recipe | None,
    pregathered_layers: int | Literal["all"],
    reduce_over_dp: ReduceOverDp,
):
    """Sums over all ranks and sequences: of losses, of tokens, and of gradients."""
    model_def, recipe = state.model_def, current_recipe() if recipe is None else recipe
    stochastic = recipe is not None and any(k.operands is not None and k.operands.stochastic for k in recipe.kinds)

    last = reduce_over_dp == "last" and microbatches > 1

    def local(params: Tree, batch: Tree, step: jax.Array):
        model_of = _model_of(model_def, params, recipe, pregathered_layers, whole_gradients=last)
        params = as_shards(params, model_def.layouts) if last else params

        def one(params: Tree, part: Tree, number: jax.Array | int):
            key = rounding_key(step, number) if stochastic else None
            total, tokens = _checked(loss, model_of(params, key), part)
            return total, tokens

        value_and_grad = jax.value_and_grad(one, has_aux=True)
        if microbatches == 1:
            (total, tokens), gradients = value_and_grad(params, batch, 0)
        else:
            parts = jax.tree.map(lambda a: _microbatches(a, microbatches), batch)

            def add(sums: Tree, numbered: Tree) -> tuple[Tree, None]:
                (total, tokens), gradients = value_and_grad(params, *numbered)
                return jax.tree.map(jnp.add, sums, (total, tokens, gradients)), None

            shapes = jax.eval_shape(lambda: value_and_grad(params, jax.tree.map(lambda a: a[0], parts), 0))
            (total, tokens), gradients = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            (total, tokens, gradients), _ = lax.scan(add, (total, tokens, gradients), (parts, jnp.arange(microbatches)))
        gradients = sum_shards(gradients, model_def.layouts) if last else gradients
        return *_over_all_ranks((total, tokens)), sum_over_replicas(gradients, model_def.specs)

    whole = PartitionSpec()
    on_mesh = _over_mesh(local, model_def, microbatches, (whole, whole, model_def.specs))
    return on_mesh(state.params, batch, state.step)


def _model_of(
    model_def: ModelDef,
    params: Tree,
    recipe: Recipe | None,
    pregathered_layers: int | Literal["all"] = 0,
    *,
    whole_gradients: bool = False,
) -> Callable[..., Any]:
    """Returns `(params, key) -> model`, whose weights are quantized here, and gathered over the optimizer's axes, once
    for all its calls. Called in local view.

    Args:
        model_def: of the model.
        params: what this rank stores.
        recipe: what is quantized.
        pregathered_layers: as in `train_step`.
        whole_gradients: leave out the sum over the optimizer's axes, as for `as_shards`.
    """
    model = model_def.model(params)
    structure = structure_of(model)
    groups = resolve(structure, recipe)
    if recipe is None and not any(group.divided for group in groups.values()):
        return lambda params, key=None: model_def.model(params)
    stored = shards_of(model)
    joined = join_stored(groups, stored, structure.written_out)
    quantized = quantize(groups, stored, pregathered_layers)
    decided = of_shards(groups) if whole_gradients else groups

    def model_of(params: Tree, key: jax.Array | None = None) -> Any:
        return with_groups(model_def.model(params), decided, quantized, key, joined)

    return model_of


def _over_mesh(local: Callable[..., Any], model_def: ModelDef, microbatches: int, out: Any) -> Callable[..., Any]:
    """Returns `local(params, batch, step)` on every rank's own part; as it is without a mesh."""

    def run(params: Tree, batch: Tree, step: jax.Array) -> Any:
        model_def.check_mesh()
        roles = model_def.roles
        parts = degrees(roles.batch) * microbatches
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            if jnp.ndim(leaf) == 0 or leaf.shape[0] % parts:
                raise ValueError(
                    f"`batch`{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; its first dimension is the "
                    f"batch and must be a multiple of {' * '.join(roles.batch)} * microbatches = {parts}."
                )
        if jax.sharding.get_abstract_mesh().empty:
            return local(params, batch, step)
        into = (model_def.specs, PartitionSpec(roles.batch), PartitionSpec())

        def in_roles(*args: Any) -> Any:
            with use_roles(roles):
                return local(*args)

        return jax.shard_map(in_roles, in_specs=into, out_specs=out, check_vma=False)(params, batch, step)

    return run


def _over_all_ranks(values: Tree) -> Tree:
    """Sums over the whole mesh.

    Ranks of an axis that does not shard the batch count the same tokens again; as losses, tokens and gradients are all
    summed so, every quotient is right.
    """
    names = jax.sharding.get_abstract_mesh().axis_names
    return lax.psum(values, names) if names else values


def _options(own: dict[str, Any] | None, recipe: Recipe | None) -> dict[str, Any]:
    kinds = () if recipe is None else recipe.kinds
    fp8 = any(kind.operands is not None and kind.operands.weight.block is None for kind in kinds)
    tensor = current_roles().tensor
    known = tensor in jax.sharding.get_abstract_mesh().axis_names  # a model may have other roles than those in scope
    return compile_options(platform(), own, tp=degree(tensor) if known else 1, fp8=fp8)


def _mean(total: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns `total` a token, 0 of no tokens: a batch that is masked throughout changes nothing but the optimizer's
    state."""
    return (total / jnp.where(tokens > 0, tokens, 1)).astype(total.dtype)


def _check_state(state: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            f"a step takes a `TrainState`; got {type(state).__name__}. `gtp_jax.TrainState.create(model, optimizer)` "
            "makes one."
        )


def _check_pregathered_layers(pregathered_layers: Any, recipe: Recipe | None) -> None:
    if pregathered_layers != "all" and (
        not isinstance(pregathered_layers, int) or isinstance(pregathered_layers, bool) or pregathered_layers < 0
    ):
        raise ValueError(
            f"`pregathered_layers` is {pregathered_layers!r}; it must be a number of layers, at least 0, or 'all'."
        )
    if pregathered_layers and recipe is None:
        raise ValueError(
            f"`pregathered_layers` is {pregathered_layers!r}, but without a recipe no codes travel that could be "
            "gathered ahead. Pass a recipe, such as `gtp_jax.NVFP4()`, or `pregathered_layers=0`."
        )


def _token_count(tokens: jax.Array, roles: Roles) -> jax.Array:
    """Returns the tokens of the batch, from the sum over all ranks: those of an axis that does not shard it count
    again."""
    names = jax.sharding.get_abstract_mesh().axis_names
    return tokens / degrees(tuple(axis for axis in names if axis not in roles.batch))


def _microbatches(batch: jax.Array, count: int) -> jax.Array:
    """Returns a rank's examples by microbatch: number m has `batch[m::count]`, of the whole batch too, so that every
    mesh has the same examples in it."""
    return jnp.swapaxes(jnp.reshape(batch, (-1, count, *batch.shape[1:])), 0, 1)


def _checked(loss: Loss, model: Any, batch: Tree) -> tuple[jax.Array, jax.Array]:
    returned = loss(model, batch)
    if not isinstance(returned, tuple) or len(returned) != 2 or any(jnp.shape(v) != () for v in returned):
        raise TypeError(
            "`loss` returns (sum of token losses, number of tokens), two scalars; it returned "
            f"{jax.tree.map(jnp.shape, returned)}. `gtp_jax.cross_entropy(logits, targets)` gives both."
        )
    return returned


def _place(tree: Tree, specs: Tree) -> Tree:
    """Holds the new state to the partition of the old one, so that it can be donated and never drifts."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    partitions = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    placed = [lax.with_sharding_constraint(a, NamedSharding(mesh, s)) for a, s in zip(leaves, partitions, strict=True)]
    return jax.tree.unflatten(structure, placed)
