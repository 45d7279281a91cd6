"""Weights that are not trained: they exist as codes, or in the dtype in which they travel, and have no master."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..formats import Format, QuantizedArray
from ..mesh import check_mesh_in_scope, current_view, stacked_spec
from ..recipes import Recipe, check_recipe
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
from ._weight import Weight, groups_of, kernel_places, weight_owners


class Frozen(GatheredOnUse):
    """A parameter that `freeze` made constant. It is no `nnx.Param`: nothing takes its gradient, no optimizer sees it.

    Of a weight that was frozen as codes it holds a `QuantizedArray`, of the matrix that is multiplied: output features
    first. `gtp_jax.dequantize(kernel.get_value())` returns its values.
    """

    constant = True  # by which `gtp_jax.shard` knows it

    def get_value(self, **index: Any) -> Any:
        """Returns what it holds.

        Raises:
            TypeError: if elements of codes are asked for.
        """
        if "index" in index and isinstance(self.get_raw_value(), QuantizedArray):
            raise TypeError(
                f"elements of a frozen weight are read, which is {self.get_raw_value().format.name} codes. Its values "
                "are `gtp_jax.dequantize(kernel.get_value())`, with the output features first."
            )
        return super().get_value(**index)

    def set_value(self, value: Any, **index: Any) -> None:
        """Refuses to change it.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a frozen weight is set, of which a step keeps what was frozen. Set parameters, such as "
            "`kernel[...] = pretrained`, ahead of `gtp_jax.freeze`."
        )


def freeze[M: nnx.Module](model: M, recipe: Recipe | None = None, *, trained: Any = nnx.LoRAParam) -> M:
    """Returns the model with all parameters constant but those that are trained, such as adapters (LoRA).

    Weights that are gathered are stored as what travels: codes and scales where the recipe quantizes them, else arrays
    of the module's dtype. No master of theirs exists, no gradient, nothing of the optimizer's, and no step quantizes
    them again: what `train_step(recipe=...)` makes of the same masters in every step, freezing makes once, bit for bit.
    Other parameters, such as norms and biases, stay as they are.

    Storage has logical shapes and is sharded like the shards that travel, so that a checkpoint restores on any mesh.
    Over axes that would divide only the optimizer's state (dp) it is whole: there is no such state.

    Inside of `gtp_jax.init` masters never leave the program that makes them:

        model = gtp_jax.init(lambda rngs: gtp_jax.freeze(Model(rngs), gtp_jax.NVFP4()), nnx.Rngs(0))

    Args:
        model: is left as it is; its weights may have been loaded.
        recipe: what is stored as codes, by which the module also multiplies; what it excludes travels as it would
            otherwise. By default nothing is. A recipe of `train_step` is about trained weights alone.
        trained: NNX filter of the parameters that stay parameters, such as `nnx.PathContains("adapter")`.

    Raises:
        TypeError: if `recipe` is no recipe.
        ValueError: if nothing would be trained, or nothing frozen; if some kernels that share a gather are trained and
            others not; if the recipe rounds gradients stochastically, or has layers of one `Stack` differ; if the mesh
            cuts blocks of the format in two; as `resolve`, if the recipe speaks of what the model does not have.
    """
    check_recipe(recipe)
    check_mesh_in_scope()
    if current_view() == "local":
        raise ValueError("`freeze` takes a model of global arrays; call it outside of the `shard_map`.")
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state, is_leaf=_is_variable)
    if any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(state)):
        raise ValueError(
            "the model is abstract, so that there is nothing to freeze. Freeze within: "
            "`gtp_jax.nn.abstract_model(lambda rngs: gtp_jax.freeze(Model(rngs), ...))`."
        )
    is_trained = nnx.filterlib.to_predicate(trained)
    paths = [path for path, _ in nnx.to_flat_state(state)]
    params = [place for place, v in enumerate(leaves) if isinstance(v, nnx.Param)]
    frozen = {place for place in params if not is_trained(paths[place], leaves[place])}
    _check_filter(trained, [".".join(map(str, paths[place])) for place in params], len(frozen))
    places = {path: own for path, own in kernel_places(graph, leaves, tree).items() if _all_frozen(path, own, frozen)}
    owners = weight_owners(model)
    groups = _groups(groups_of(model, recipe), {path: owners[path] for path in places})
    kept = _kept([groups[path] for path in places], [_masters(owners[path]) for path in places])
    put: dict[int, nnx.Variable] = {}
    for (path, own), values in zip(places.items(), kept, strict=True):
        group = groups[path]
        for place, value, layout in zip(own, values, group.layouts, strict=True):
            known = FrozenAs(_format(group), group.operands)
            put[place] = _frozen(leaves[place], value, layout=layout.of_shards, frozen=known)
    for place, variable in enumerate(leaves):
        if place not in put:  # a copy, as a step donates its state, and the model is left as it is
            value = jax.tree.map(jnp.copy, variable.get_raw_value())
            put[place] = _frozen(variable, value) if place in frozen else variable.replace(value)
    return nnx.merge(graph, jax.tree.unflatten(tree, [put[place] for place in range(len(leaves))]))


def _frozen(variable: nnx.Variable, value: Any, **metadata: Any) -> Frozen:
    kept = variable.get_metadata()
    placement = kept.get("placement")
    if placement is not None and type(variable) is placement.kind:  # `gtp_jax.shard` goes on gathering it
        kept = {**kept, "placement": dataclasses.replace(placement, kind=Frozen)}
    found: Any = Frozen.from_metadata(value, {**kept, **metadata})
    if metadata:  # codes are of another shape, as `partition_of` knows
        of_array = None if isinstance(value, QuantizedArray) else tuple(partition_of(found))
        found.set_metadata(out_sharding=of_array)
    return found


def _masters(owner: Weight) -> Shards:
    return tuple(variable.get_raw_value() for variable in owner.weights())


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def _check_filter(trained: Any, names: Sequence[str], frozen: int) -> None:
    if frozen == len(names):
        raise ValueError(
            f"`trained` is {trained!r}, which matches none of the model's parameters ({', '.join(names[:4])}, ...): "
            "nothing would be left to train. Give adapters the type `nnx.LoRAParam`, as `nnx.LoRA` does, or pass a "
            "filter such as `nnx.PathContains('adapter')`."
        )
    if not frozen:
        raise ValueError(f"`trained` is {trained!r}, which matches all of the model's parameters: nothing is frozen.")


def _all_frozen(path: ModulePath, places: Sequence[int], frozen: Collection[int]) -> bool:
    """Says whether a module's kernels are frozen, which is one thing for all that share a gather."""
    own = [place in frozen for place in places]
    if any(own) and not all(own):
        raise ValueError(
            f"some kernels of {'.'.join(map(str, path))} match `trained` and others do not; they are gathered "
            "together, so that all of them are trained or none. Let the filter name the module."
        )
    return all(own)


def _groups(groups: Groups, owners: Mapping[ModulePath, Weight]) -> dict[ModulePath, WeightGroup]:
    """Returns what is decided about each weight that is frozen, by path."""
    found: dict[ModulePath, WeightGroup] = {}
    for (path, _), group in groups.items():
        name = ".".join(map(str, path))
        if path not in owners:
            continue
        owners[path].check_mesh()
        if path in found:
            raise ValueError(
                "`high_precision_first` and `high_precision_last` are for layers of a `Stack` that differ; frozen "
                "weights of a stack are one array, of one format. Leave them out, or name modules in `exclude`."
            )
        if group.stochastic:
            raise ValueError(
                f"the recipe rounds gradients stochastically as they pass {name}, for which a frozen weight has no "
                "key. Pass `gtp_jax.NVFP4(matmuls=True, stochastic=False)`."
            )
        form = group.wire
        if not isinstance(form, Format | None):
            raise ValueError(
                f"the recipe has {name} travel in {form.name}, which has no form for storage. Freeze with a recipe of "
                "gtp_jax, such as `gtp_jax.NVFP4()`, or name the module in `exclude`."
            )
        cut = [layout for layout in group.layouts if form is not None and cuts_blocks(layout, form)]
        if cut and form is not None:
            raise ValueError(
                f"the weight of shape {cut[0].shape} of {name} has shards of shape {cut[0].shard_shape}, which are no "
                f"whole blocks of {form.name}: {form.block}, output features x input features. Choose sizes or "
                "degrees that leave whole blocks, name it in the recipe's `exclude`, or take `gtp_jax.FP8()`, which "
                "has no blocks."
            )
        found[path] = group
    return found


def _kept(groups: Sequence[WeightGroup], masters: Sequence[Shards]) -> list[tuple[Any, ...]]:
    """Returns what is stored of weights that are frozen, in place of their masters."""
    coded = [group for group in groups if group.wire is not None]

    def run(masters: Sequence[Shards]) -> list[tuple[Any, ...]]:
        pairs = list(zip(groups, masters, strict=True))
        codes = iter(quantize_frozen(coded, [mine for group, mine in pairs if group.wire is not None]))
        return [_cast(group, mine) if group.wire is None else next(codes) for group, mine in pairs]

    return jax.jit(run)(masters)


def _format(group: WeightGroup) -> Format | None:
    assert isinstance(group.wire, Format | None)
    return group.wire


def _cast(group: WeightGroup, masters: Shards) -> tuple[jax.Array, ...]:
    """Returns masters in the dtype in which they travel, sharded like what travels."""
    cast = tuple(jnp.array(x, group.dtype, copy=True) for x in masters)
    if current_view() != "global":
        return cast
    specs = [one.of_shards.spec for one in group.layouts] if group.array is None else [group.array.spec]
    return tuple(
        lax.with_sharding_constraint(x, stacked_spec(spec, x.ndim)) for x, spec in zip(cast, specs, strict=True)
    )
