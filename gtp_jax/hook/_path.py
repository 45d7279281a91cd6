"""Reads the paths of a weight in its model. Recipes select weights by these paths.

A weight has several paths if the weight, or a module around it, is held in several places. The paths are metadata of
the weight's variable, which compare equal: `jax.tree.map` over the states of two blocks, or of two networks, compares
metadata. The class of a unit or holder has the paths of its weights too (`Placements`), which differ. It is part of the
key of JAX's cache if the module is an argument of a transformed function: a program that was traced for one block is
not reused for another, for which a recipe may decide differently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import nnx

Paths = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class WeightPaths:
    """The paths of a weight, as metadata. All instances are equal.

    Attributes:
        each: the paths. The first is the path in `nnx.state` of the model that was sharded.
    """

    each: Paths = dataclasses.field(compare=False)


def named(nodes: Mapping[Any, Any], paths: Mapping[Any, Paths]) -> None:
    """Gives weights the paths that they had when their module was sharded. A weight has others if its variable came
    from the state of another module.

    Args:
        nodes: the nodes of a module, by path. Nodes that are no sharded weights are left as they are.
        paths: the paths of the module's weights, by path in the module.
    """
    for path, own in paths.items():
        node = nodes.get(path)
        if isinstance(node, nnx.Variable) and (has := node.get_metadata().get("weight_paths")) and has.each != own:
            node.set_metadata(weight_paths=WeightPaths(own))


def paths_of(variable: nnx.Variable) -> Paths:
    """Returns the paths of a sharded weight in the model that was sharded, as `shard` recorded them. The first is the
    path in `nnx.state`."""
    return variable.get_metadata()["weight_paths"].each


def path_of(variable: nnx.Variable) -> tuple[str, ...]:
    """Returns the path of a sharded weight in the `nnx.state` of the model that was sharded."""
    return paths_of(variable)[0]


def path_of_unit(unit: nnx.Module) -> tuple[str, ...] | None:
    """Returns the path of a unit, or of the unit of which it is a copy, in the model that was sharded: what the paths
    of its weights have in front of their paths in the unit. `None` if no weight's path ends like that."""
    for own, variable in nnx.iter_graph(unit):
        within = tuple(map(str, own))
        known = isinstance(variable, nnx.Variable) and "weight_paths" in variable.get_metadata()
        for path in paths_of(variable) if known else ():
            if path[len(path) - len(within) :] == within:
                return path[: len(path) - len(within)]
    return None


def weight_paths(model: nnx.Module) -> tuple[tuple[str, ...], ...]:
    """Returns all paths that `shard` recorded for the weights of a model, and those that other variables have copied
    with a weight's metadata. A path may occur more than once."""
    variables = (node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable))
    return tuple(path for v in variables if "weight_paths" in v.get_metadata() for path in paths_of(v))
