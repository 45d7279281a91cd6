"""The path of a weight in its model, by which recipes know it."""

from __future__ import annotations

from typing import Any

from flax import nnx

from ..recipes import Recipe
from ._scope import recipe_in_scope


class WeightPath:
    """The path of a weight, as metadata of its variable.

    Metadata are part of the keys of JAX's caches, and must be equal where a model's code stacks the variables of
    several blocks. Two paths are therefore equal if the recipe in scope decides the same about both; without a recipe
    all are. The recipe in scope is part of those keys too, so that no program serves a weight about which it decides
    otherwise.

    Args:
        names: from the model to the variable.
    """

    def __init__(self, names: tuple[Any, ...]) -> None:
        self.names = tuple(map(str, names))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WeightPath):
            return NotImplemented
        recipe = recipe_in_scope()
        return self.names == other.names or recipe is None or self._decided(recipe) == other._decided(recipe)

    def __hash__(self) -> int:
        return hash(WeightPath)

    def __repr__(self) -> str:
        return ".".join(self.names)

    def _decided(self, recipe: Recipe) -> Recipe:
        return recipe.of(self.names)


def path_of(variable: nnx.Variable) -> tuple[str, ...]:
    """Returns the path of a sharded weight in the model that was sharded; it ends in the name of the variable."""
    return variable.get_metadata()["weight_path"].names


def weight_paths(model: nnx.Module) -> tuple[tuple[str, ...], ...]:
    """Returns the paths of the weights of a model that `shard` has sharded."""
    variables = (node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable))
    return tuple(path_of(v) for v in variables if "weight_path" in v.get_metadata())
