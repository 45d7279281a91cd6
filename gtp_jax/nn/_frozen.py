"""Freezes weights: they are stored as codes, or in the dtype in which they are sent, and have no master copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..formats import Format, QuantizedArray, Tiled
from ..hook import Coded, decide, evenly_stored, paths_of, placement_of
from ..layout import Layout, Placement, cut, is_padded, layouts_in_blocks, layouts_of_codes, pad, shares_may_be_even
from ..mesh import check_mesh_in_scope, current_view, stacked_spec
from ..recipes import Recipe, check_recipe
from ..variables import RefuseLinen, logical_shape, padded_layout, split_nodes
from ..weights import (
    FrozenAs,
    Groups,
    ModulePath,
    Shards,
    WeightGroup,
    cuts_blocks,
    quantize_frozen,
)
from ._array import GatheredOnUse
from ._layer import partition_of
from ._owners import groups_of, kernel_places, weight_owners
from ._weight import Weight


class Frozen(GatheredOnUse):
    """A parameter that `freeze` made constant. It is not an `nnx.Param`: it has no gradient, and no optimizer sees it.

    A weight that was frozen as codes is stored as a `QuantizedArray` of its matrix, whose rows are the output features.
    `gtp_jax.ops.dequantize(kernel.get_value())` returns its values. If the codes are stored padded, `get_value` removes
    the padding, except in local view; `get_raw_value` does not.
    """

    constant = True  # `gtp_jax.shard` recognizes frozen weights by this

    def get_value(self, **index: Any) -> Any:
        """Returns the value of the variable.

        Raises:
            TypeError: if an index is given, as in `kernel[...]`, but the weight is stored as codes.
        """
        if "index" in index and isinstance(self.get_raw_value(), QuantizedArray):
            raise TypeError(
                "a frozen weight is read by index, as in `kernel[...]`, but it is stored as "
                f"{self.get_raw_value().format.name} codes. Read its values with "
                "`gtp_jax.ops.dequantize(kernel.get_value())`, whose first dimension is the output features."
            )
        value = super().get_value(**index)
        if current_view() == "local" or not (padded := padded_codes(self)):
            return value
        return dataclasses.replace(value, **{name: cut(getattr(value, name), own) for name, own in padded.items()})

    def set_value(self, value: Any, **index: Any) -> None:
        """Raises an error, because a frozen weight cannot be set.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a frozen weight cannot be set: steps use the value that it had when it was frozen. Set parameters "
            "(`kernel[...] = pretrained`) before `gtp_jax.nn.freeze`."
        )


def padded_codes(variable: nnx.Variable) -> dict[str, Placement]:
    """Returns the layouts of the arrays of a weight that is stored as padded codes, by their names in `QuantizedArray`;
    empty for any other variable."""
    metadata = variable.get_metadata()
    layout, frozen = metadata.get("layout"), metadata.get("frozen")
    if layout is None or not is_padded(layout) or frozen is None or frozen.wire is None:
        return {}
    return layouts_of_codes(layout, frozen.wire.format if isinstance(frozen.wire, Tiled) else frozen.wire)


def freeze[M: nnx.Module](model: M, recipe: Recipe | None = None, *, trained: Any = nnx.LoRAParam) -> M:
    """Returns a copy of the model in which all parameters are constant, except those that `trained` matches, such as
    LoRA adapters.

    Weights that gtp_jax's layers gather are stored in the form in which they are sent: as codes and scales if the
    recipe quantizes them, otherwise as arrays in the module's dtype. They have no master copy, gradient or optimizer
    state. No step quantizes them again. The codes equal, bit for bit, those that `train_step(recipe=...)` would compute
    in every step from the same master weights. Other constant parameters, such as norms, biases and the parameters of a
    model that `gtp_jax.shard` sharded, keep their values and dtypes.

    Each rank stores the shard that it sends. The optimizer's axes (dp) do not divide shards further, because there is
    no master copy or optimizer state. Arrays may be padded: codes to shards of whole blocks, so that the codes of the
    weight are those of one device; `gtp_jax.layout.even_shares(False)` prevents it. Shards may cut the tiles of
    `gtp_jax.recipes.FP8Blocks`, whose scales every rank stores. Checkpoints contain no padding, and can be restored on
    another mesh.

    Inside `gtp_jax.init`, master weights never leave the program that computes them:

        model = gtp_jax.init(lambda rngs: gtp_jax.nn.freeze(Model(rngs), gtp_jax.NVFP4()), nnx.Rngs(0))

    Args:
        model: the model, which is not changed. Its weights may have been loaded.
        recipe: the recipe, which decides which weights are stored as codes, and in which formats their modules
            multiply. Weights that it excludes are stored in the module's dtype. By default, no weight is stored as
            codes. The recipe of a later `train_step` applies only to trained weights.
        trained: an NNX filter for the parameters that remain parameters, such as `nnx.PathContains("adapter")`.

    Raises:
        TypeError: if `recipe` is not a recipe.
        ValueError: if no parameter would be trained, or none would be frozen; if the recipe quantizes a weight to be
            frozen that `gtp_jax.shard` sharded; if only some of the kernels of one module would be trained; if the
            recipe rounds gradients stochastically, has delayed scaling, sends weights in a format that cannot be
            stored, or gives layers of one `Stack` different formats; if the shards of a weight to be stored as codes
            are not whole blocks of the format, and are not padded; if the recipe cannot apply to the model (see
            `gtp_jax.weights.resolve`); if the model was built for other mesh degrees; or if the model is abstract, or
            the call is inside a `shard_map`.
    """
    check_recipe(recipe)
    check_mesh_in_scope()
    if current_view() == "local":
        raise ValueError(
            "`freeze` takes a model of global arrays, but it is called inside a `shard_map`. Call it outside."
        )
    template, leaves = split_nodes(model)
    if any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(leaves)):
        raise ValueError(
            "the model is abstract, so there are no values to freeze. Freeze it inside `abstract_model`: "
            "`gtp_jax.nn.abstract_model(lambda rngs: gtp_jax.nn.freeze(Model(rngs), ...))`."
        )
    is_trained = nnx.filterlib.to_predicate(trained)
    paths = template.paths
    params = [place for place, v in enumerate(leaves) if isinstance(v, nnx.Param)]
    frozen = {place for place in params if not is_trained(paths[place], leaves[place])}
    _check_filter(trained, [".".join(map(str, paths[place])) for place in params], len(frozen))
    # no optimizer sees frozen weights, so they may be stored padded before there is a state
    apart = {id(leaves[place]) for place in frozen}
    model, _ = evenly_stored(model, lambda variable: id(variable) in apart)
    template, leaves = split_nodes(model)
    owners = weight_owners(model)
    places = {path: own for path, own in kernel_places(owners, leaves).items() if _all_frozen(path, own, frozen)}
    if recipe is not None:
        _refuse_sharded([leaves[place] for place in sorted(frozen)], recipe)
    groups = _groups(groups_of(model, recipe), {path: owners[path] for path in places})
    kept = _kept([groups[path] for path in places], [owners[path] for path in places])
    put: dict[int, nnx.Variable] = {}
    for (path, own), values in zip(places.items(), kept, strict=True):
        group = groups[path]
        operands = None if group.operands is None else dataclasses.replace(group.operands, keep_codes=False)
        for place, value, layout in zip(own, values, group.layouts, strict=True):
            known = FrozenAs(group.wire, operands)  # there is no wgrad for which to keep codes
            put[place] = _frozen(leaves[place], value, layout=layout.of_shards, frozen=known)
    for place, variable in enumerate(leaves):
        if place not in put:  # copied, because a step donates its state, and the given model must not change
            value = jax.tree.map(jnp.copy, variable.get_raw_value())
            put[place] = _frozen(variable, value) if place in frozen else variable.replace(value)
    return template.merged([put[place] for place in range(len(leaves))])


def _frozen(variable: nnx.Variable, value: Any, **metadata: Any) -> Frozen:
    kept: dict[str, Any] = dict(variable.get_metadata())
    placement = kept.get("placement")
    if placement is not None and type(variable) is placement.kind:  # so that `gtp_jax.shard` still gathers it
        kept = {**kept, "placement": dataclasses.replace(placement, kind=Frozen)}
    elif placement is not None:  # an adapter, which has copied the metadata
        kept = {name: own for name, own in kept.items() if name != "padded"}
    kept |= metadata
    found: Any = Frozen.from_metadata(value, kept)
    if kept.get("linen_meta_type") is RefuseLinen and padded_layout(found) is None and not padded_codes(found):
        kept = {name: own for name, own in kept.items() if name not in ("linen_meta_type", "on_create_value")}
        found = Frozen.from_metadata(value, kept)  # only the optimizer's axes (dp) needed the padding
    if metadata:  # codes have another shape; `partition_of` returns their partitions
        of_array = None if isinstance(value, QuantizedArray) else tuple(partition_of(found))
        found.set_metadata(out_sharding=of_array)
    return found


def _masters(owner: Weight) -> Shards:
    return tuple(variable.get_raw_value() for variable in owner.weights())


def _in_blocks(group: WeightGroup) -> WeightGroup:
    """Returns the group of a weight with shards that are whole blocks of its format, if padding can make them so."""
    form = group.wire
    if not isinstance(form, Format) or group.ranks == 1:
        return group
    padded = any(layout.shard_padding.size for layout in group.layouts)
    if not padded and not (shares_may_be_even() and any(cuts_blocks(layout, form) for layout in group.layouts)):
        return group
    layouts = layouts_in_blocks(group.layouts, form)
    same = layouts == tuple(layout.of_shards for layout in group.layouts)
    return group if same else dataclasses.replace(group, layouts=layouts)


def _check_filter(trained: Any, names: Sequence[str], frozen: int) -> None:
    if not names:
        raise ValueError(
            "the model has no parameters, or all of them are frozen already, so there is nothing to freeze."
        )
    if frozen == len(names):
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        raise ValueError(
            f"`trained` is {trained!r}, which matches none of the model's parameters ({shown}), so there "
            "would be nothing to train. Give adapters the type `nnx.LoRAParam`, as `nnx.LoRA` does, or pass a filter "
            "such as `nnx.PathContains('adapter')`."
        )
    if not frozen:
        raise ValueError(
            f"`trained` is {trained!r}, which matches all of the model's parameters, so nothing would "
            "be frozen. Pass a filter that matches fewer."
        )


def _refuse_sharded(variables: Sequence[nnx.Variable], recipe: Recipe) -> None:
    """Raises a `ValueError` if the recipe quantizes one of the variables to be frozen that `gtp_jax.shard` sharded."""
    for variable in variables:
        placement = placement_of(variable)
        if placement is None:
            continue
        paths = paths_of(variable)
        if isinstance(decide(recipe, paths, logical_shape(variable), placement), Coded):
            raise ValueError(
                f"`recipe` quantizes {'.'.join(paths[0])}, a weight that `gtp_jax.shard` has sharded, which cannot be "
                "frozen as codes; weights of gtp_jax's own layers can. Remove `recipe`, or name the weight in its "
                "`exclude`."
            )


def _all_frozen(path: ModulePath, places: Sequence[int], frozen: Collection[int]) -> bool:
    """Returns whether all kernels of a module are frozen.

    Raises:
        ValueError: if only some of them are, because trained and frozen kernels cannot be gathered together.
    """
    own = [place in frozen for place in places]
    if any(own) and not all(own):
        raise ValueError(
            f"some kernels of {'.'.join(map(str, path))} match `trained` and others do not. They are gathered "
            "together, so either all or none of them can be trained. Match the whole module instead."
        )
    return all(own)


def _groups(groups: Groups, owners: Mapping[ModulePath, Weight]) -> dict[ModulePath, WeightGroup]:
    """Returns the weight groups of the weights that will be frozen, by path.

    Raises:
        ValueError: if what the recipe decides about one of these weights cannot apply to a frozen weight.
    """
    found: dict[ModulePath, WeightGroup] = {}
    for (path, _), group in groups.items():
        name = ".".join(map(str, path))
        if path not in owners:
            continue
        owners[path].check_mesh()
        if path in found:
            raise ValueError(
                "`high_precision_first` and `high_precision_last` make layers of a `Stack` differ, but the frozen "
                "weights of a stack are one array of one format. Remove them, or name modules in `exclude`."
            )
        if group.stochastic:
            raise ValueError(
                f"the recipe rounds the gradients that pass through {name} stochastically, but a frozen weight has "
                "no random key. Pass `gtp_jax.NVFP4(matmuls=True, stochastic=False)`."
            )
        if group.delayed is not None:
            raise ValueError(
                f"the recipe scales {name} by amaxes of earlier steps, of which a frozen weight has none. Freeze with "
                "`gtp_jax.FP8(matmuls=True)`, which scales each operand by its own amax."
            )
        form = group.wire
        if not isinstance(form, Format | Tiled | None):
            raise ValueError(
                f"the recipe sends {name} in {form.name}, which cannot be stored. Freeze with one of gtp_jax's "
                "recipes, such as `gtp_jax.NVFP4()`, or name the module in `exclude`."
            )
        group = _in_blocks(group)
        cutting = [layout for layout in group.layouts if isinstance(form, Format) and cuts_blocks(layout, form)]
        if cutting and isinstance(form, Format):
            padding = "" if shares_may_be_even() else "leave out `gtp_jax.layout.even_shares(False)`, "
            raise ValueError(
                f"the weight of shape {cutting[0].shape} of {name} has shards of shape {cutting[0].shard_shape}, which "
                f"cannot be divided into blocks of {form.name}: {form.block}, output features x input features. "
                f"Choose sizes or degrees that give whole blocks, {padding}name the module in the recipe's `exclude`, "
                "or use `gtp_jax.FP8()`, which has no blocks."
            )
        found[path] = group
    return found


def _kept(groups: Sequence[WeightGroup], owners: Sequence[Weight]) -> list[tuple[Any, ...]]:
    """Returns, for each weight to be frozen, the arrays or codes that are stored instead of its masters."""
    coded = [group for group in groups if group.wire is not None]
    built = [owner.layouts for owner in owners]

    def run(masters: Sequence[Shards]) -> list[tuple[Any, ...]]:
        laid_out = [_laid_out(*one) for one in zip(masters, built, (group.layouts for group in groups), strict=True)]
        pairs = list(zip(groups, laid_out, strict=True))
        codes = iter(quantize_frozen(coded, [mine for group, mine in pairs if group.wire is not None]))
        return [_cast(group, mine) if group.wire is None else next(codes) for group, mine in pairs]

    return jax.jit(run)([_masters(owner) for owner in owners])


def _laid_out(masters: Shards, before: Sequence[Layout], after: Sequence[Layout]) -> Shards:
    """Returns masters as other layouts store them."""
    if tuple(before) == tuple(after):
        return masters
    moved = tuple(pad(cut(x, one), other) for x, one, other in zip(masters, before, after, strict=True))
    if current_view() != "global":
        return moved
    return tuple(
        lax.with_sharding_constraint(x, stacked_spec(layout.spec, x.ndim))
        for x, layout in zip(moved, after, strict=True)
    )


def _cast(group: WeightGroup, masters: Shards) -> tuple[jax.Array, ...]:
    """Returns masters in the dtype in which they are sent, partitioned into the shards that ranks send."""
    of_shards = [x if one.shard_padding.size else cut(x, one) for x, one in zip(masters, group.layouts, strict=True)]
    cast = tuple(jnp.array(x, group.dtype, copy=True) for x in of_shards)
    if current_view() != "global":
        return cast
    specs = [one.of_shards.spec for one in group.layouts] if group.array is None else [group.array.spec]
    return tuple(
        lax.with_sharding_constraint(x, stacked_spec(spec, x.ndim)) for x, spec in zip(cast, specs, strict=True)
    )
