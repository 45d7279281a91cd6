"""Finds the weights of a model, the modules that own them, and the stacks that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from ..hook import weight_paths
from ..recipes import Recipe
from ..variables import Leaf, split_nodes
from ..weights import Groups, Layers, ModulePath, Structure, resolve
from ._layer import with_value
from ._weight import ArrayWeight, StackedLayers, Weight, WeightOwner


def weight_owners(module: nnx.Module) -> dict[ModulePath, Weight]:
    """Returns the owners of the weights in a module, by path. They are the modules that own kernels, possibly including
    `module` itself, by their own paths, and an `ArrayWeight` for each weight of any shape, by the path of its
    variable."""
    found: dict[ModulePath, Weight] = {}
    for path, node in nnx.iter_graph(module):
        if isinstance(node, WeightOwner):
            found[path] = node
        elif isinstance(node, nnx.Variable) and "array" in node.get_metadata():
            found[path] = ArrayWeight(node)
    return found


def stacks_of(model: nnx.Module) -> dict[ModulePath, StackedLayers]:
    """Returns the stacks in a model, by the path of their layers."""
    return {(*path, "layers"): m for path, m in nnx.iter_modules(model) if isinstance(m, StackedLayers)}


def layer_counts(model: nnx.Module) -> dict[tuple[str, ...], int]:
    """Returns the number of layers that each parameter of a model holds along its first dimension, by path; 0 outside a
    `Stack`."""
    stacks = stacks_of(model)
    found = {}
    for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        inside = [stack.length for start, stack in stacks.items() if path[: len(start)] == start]
        found[tuple(map(str, path))] = inside[0] if inside else 0
    return found


def groups_of(model: nnx.Module, recipe: Recipe | None) -> Groups:
    """Returns the weight groups of a model under a recipe; see `gtp_jax.weights.resolve`."""
    stacks = stacks_of(model)
    structure = Structure(
        type(model).__name__,
        {path: owner.built_group for path, owner in weight_owners(model).items()},
        tuple(Layers(0, m.length, path, m.schedule.unroll == "full") for path, m in stacks.items()),
        weight_paths(model),
    )
    return resolve(structure, recipe)


def name_weights(model: nnx.Module) -> None:
    """Stores the path of each weight's owner in the metadata of the weight's variables, so that recipes in scope can
    match their patterns against it."""
    for path, owner in weight_owners(model).items():
        for weight in owner.weights():
            weight.set_metadata(path=path)


def with_weights(module: nnx.Module, values: Mapping[ModulePath, Sequence[Any]]) -> Any:
    """Returns a copy of a module with the given values in the variables of its weights.

    Args:
        module: the module, which is not changed.
        values: for each owner of weights, by path, one value for each of its variables.
    """
    template, leaves = split_nodes(module)
    for path, places in kernel_places(weight_owners(module), leaves).items():
        for place, value in zip(places, values[path], strict=True):
            leaves[place] = with_value(leaves[place], value)
    return template.merged(leaves)


def kernel_places(owners: Mapping[ModulePath, Weight], leaves: Sequence[Leaf]) -> dict[ModulePath, tuple[int, ...]]:
    """Returns, for each owner of weights, by path, the indices of its variables among the leaves of a module."""
    places = {id(leaf): i for i, leaf in enumerate(leaves)}
    return {path: tuple(places[id(variable)] for variable in owner.weights()) for path, owner in owners.items()}
