"""Resolves what a recipe decides about each weight of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from ..formats import Tiled
from ..recipes import EXCLUDED, Recipe, matches
from ._group import WeightGroup
from ._tiles import check_tiles
from ._wire_spec import ModulePath


class Layers(NamedTuple):
    """The layers of a stack to which a decision applies.

    Attributes:
        start: the first layer.
        stop: the layer after the last.
        stack: the path of the stacked layers; `None` for a module outside stacks, which counts as one layer.
        written_out: whether the stack runs without a loop.
    """

    start: int
    stop: int
    stack: ModulePath | None = None
    written_out: bool = False


@dataclasses.dataclass(frozen=True)
class Structure:
    """What `resolve` needs to know about a model.

    Attributes:
        name: the name of the model's type.
        weights: the group of each module that owns kernels, by the module's path, and of each array of any shape, by
            the path of its variable. A frozen group has its own formats; the others are in high precision.
        stacks: all layers of each stack.
        sharded: the paths of the weights that `gtp_jax.shard` has sharded, about which `gtp_jax.hook` decides.
    """

    name: str
    weights: Mapping[ModulePath, WeightGroup]
    stacks: tuple[Layers, ...]
    sharded: tuple[ModulePath, ...] = ()


# The decisions about the weights of each module, for each range of layers, in the model's order.
Groups = dict[tuple[ModulePath, Layers], WeightGroup]


def resolve(structure: Structure, recipe: Recipe | None) -> Groups:
    """Returns what a recipe decides about every weight of a model.

    Frozen weights keep their formats. Without a recipe, all other weights stay in high precision.

    Raises:
        ValueError: if the recipe names modules or layers that the model does not have, or only frozen ones; if earlier
            patterns match all that a pattern matches; if the recipe quantizes and the model has no weights for it; or
            for the reasons that `of_layers` lists.
    """
    if recipe is not None:
        _check_names(structure, recipe)
    found: Groups = {}
    for path, group in structure.weights.items():
        around = (one for one in structure.stacks if one.stack is not None and path[: len(one.stack)] == one.stack)
        layers = next(around, Layers(0, 1))
        if recipe is None:
            found[path, layers] = group
            continue
        for some, decided in of_layers(group, path, recipe, layers):
            found[path, some] = decided
    return found


def of_layers(
    group: WeightGroup, path: ModulePath, recipe: Recipe, layers: Layers
) -> tuple[tuple[Layers, WeightGroup], ...]:
    """Returns what a recipe decides about the weights of one module, by layers.

    Args:
        group: the module's group: in high precision, or frozen, which the recipe leaves as it is.
        path: the path of the module in the model.
        recipe: the recipe.
        layers: all layers of the stack that contains the module, or the one layer of a module outside stacks.

    Raises:
        ValueError: if the recipe multiplies in tiles, and the module is neither a dense layer nor experts, or tensor
            ranks would cut tiles or divide the weight unevenly; or if it multiplies with delayed scaling, and the
            module is not a dense layer, or its gradient's amax is not available on any rank.
    """
    if not group.follows_recipes:
        return ((layers, group),)
    chosen = recipe.of(path)
    resolved = dataclasses.replace(group, wire=chosen.wire, operands=chosen.operands, reduction=chosen.reduction)
    if isinstance(chosen.wire, Tiled):
        _check_multiplies(resolved, path, chosen.wire.format.name, experts=True)
        check_tiles(resolved, path)
    if resolved.delayed is not None:
        _check_multiplies(resolved, path, "FP8 with delayed scaling", experts=False)
    if layers.stack is None:
        return ((layers, resolved),)
    first, last = recipe.high_precision_first, layers.stop - recipe.high_precision_last
    spans = ((0, first, group), (first, last, resolved), (last, layers.stop, group))
    return tuple((layers._replace(start=start, stop=stop), kind) for start, stop, kind in spans if start < stop)


def _check_names(structure: Structure, recipe: Recipe) -> None:
    paths = [tuple(map(str, path)) for path, group in structure.weights.items() if group.follows_recipes]
    paths += [tuple(map(str, path)) for path in structure.sharded]
    if not paths and recipe.wire is not None:
        frozen = " other than frozen ones" if any(group.frozen for group in structure.weights.values()) else ""
        raise ValueError(
            f"`recipe` quantizes to {recipe.wire.name}, but {structure.name} has no gathered weights{frozen} to "
            "quantize. Build the model from gtp_jax modules, such as `gtp_jax.Dense`; shard the model's own weights "
            "with `gtp_jax.shard`; or remove the recipe."
        )
    _check_patterns(structure, paths, recipe)
    if structure.stacks or not structure.sharded:  # the hook refuses to count layers
        check_ends({".".join(map(str, (one.stack or ())[:-1])): one.stop for one in structure.stacks}, recipe)


def check_ends(stacks: Mapping[str, int], recipe: Recipe) -> None:
    """Checks that every stack has the layers that `high_precision_first` and `high_precision_last` ask for.

    Args:
        stacks: the number of layers of each stack, by name.
        recipe: the recipe.

    Raises:
        ValueError: if they ask for layers, and a stack has fewer or there is no stack. The message names the stacks.
    """
    ends = recipe.high_precision_first + recipe.high_precision_last
    if ends and (not stacks or ends > min(stacks.values())):
        there = ", ".join(f"{name} has {length}" for name, length in stacks.items()) or "there is no `Stack`"
        raise ValueError(
            f"`high_precision_first` {recipe.high_precision_first} and `high_precision_last` "
            f"{recipe.high_precision_last} cover {ends} layers of each stack, but {there}."
        )


def _check_patterns(structure: Structure, paths: Sequence[tuple[str, ...]], recipe: Recipe) -> None:
    """Checks that each pattern, except default exclusions, decides about some of the weights that recipes apply to,
    whose `paths` are given."""
    patterns = [pattern for pattern, _ in recipe.rules]
    for index, pattern in enumerate(patterns):
        if index >= len(recipe.override) and pattern in EXCLUDED:
            continue  # a default exclusion, which need not match anything
        matched = [path for path in paths if matches(pattern, path)]
        if not matched:
            frozen = (tuple(map(str, path)) for path, group in structure.weights.items() if group.frozen)
            only = ", only frozen ones" if any(matches(pattern, path) for path in frozen) else ""
            there = ", ".join(".".join(path) for path in paths) or f"no weights of {structure.name}; remove the pattern"
            raise ValueError(
                f"the recipe's pattern {pattern!r} matches no module with weights that recipes apply to{only}. Recipes "
                f"apply to {there}."
            )
        if all(any(matches(ahead, path) for ahead in patterns[:index]) for path in matched):
            raise ValueError(
                f"the recipe's pattern {pattern!r} has no effect, because earlier patterns match everything that it "
                f"matches. {_to_take_effect(index, matched, recipe)}"
            )


def _to_take_effect(index: int, matched: Sequence[tuple[str, ...]], recipe: Recipe) -> str:
    """Returns the remedy for a pattern that earlier ones hide, given its index in `rules` and the paths it matches."""
    names = [pattern for pattern, _ in recipe.rules]
    pattern, overrides = names[index], names[: min(index, len(recipe.override))]
    hiding = [ahead for ahead in overrides if any(matches(ahead, path) for path in matched)]
    ahead = ", ".join(map(repr, hiding))
    if index < len(recipe.override):
        return f"Move it before {ahead}, or remove it."
    if not hiding or pattern in hiding:  # it excludes what is excluded, or is overridden itself
        return f"Remove it from `exclude`{' or from `override`' if hiding == [pattern] else ''}."
    return (
        f"`override` comes before `exclude`. Move it to `override`, as {pattern!r}: gtp_jax.recipes.BF16(), before "
        f"{ahead}; or remove it."
    )


def _check_multiplies(group: WeightGroup, path: ModulePath, numbers: str, *, experts: bool) -> None:
    """Refuses a weight whose module is not a dense layer or, if `experts`, a layer of experts; with delayed scaling,
    also a weight if no rank knows the amax of its gradient. `numbers` says what the weight would be multiplied in."""
    name = ".".join(map(str, path)) or "a module"
    remedy = f"Name {name} in the recipe's `exclude`, or choose another recipe for it by `override`."
    if not group.codes_multiply or (group.has_experts and not experts):
        able = "dense layers and experts" if experts else "dense layers"
        kind = "experts" if group.has_experts else "not a dense layer"
        raise ValueError(
            f"the recipe multiplies in {numbers}, which only {able} support, but {name} is {kind}. {remedy}"
        )
    if group.delayed is None:
        return
    first, sizes = group.layouts[0], dict(jax.sharding.get_abstract_mesh().shape)
    divides = {*first.roles.batch, None if first.split is None else first.roles.tensor}
    alike = [axis for axis, size in sizes.items() if size > 1 and axis not in divides]
    if alike:
        # the gradient that such a rank receives is a part of the whole, which code around the layer chooses
        raise ValueError(
            f"the recipe multiplies in {numbers}, but {alike[0]} = {sizes[alike[0]]} divides neither the batch nor the "
            f"weight of {name}, so no rank knows the amax of its gradient. {remedy} Or build the layer with "
            "`parallel='column'` or `'row'`."
        )
