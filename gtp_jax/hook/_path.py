"""Reads the paths of a weight in its model. Recipes select weights by these paths.

A weight has several paths if the weight, or a module around it, is held in several places. The paths are metadata of
the weight's variable. If the variable is an argument of a transformed function, they are therefore part of the key of
JAX's cache: a program that was traced for one weight is not reused for a weight with other paths, for which a recipe
may decide differently. Because the metadata of their weights differ, the states of different blocks cannot be stacked
with `jax.tree.map`.
"""

from __future__ import annotations

from flax import nnx


def paths_of(variable: nnx.Variable) -> tuple[tuple[str, ...], ...]:
    """Returns the paths of a sharded weight in the model that was sharded, as `shard` recorded them. The first is the
    path in `nnx.state`."""
    return variable.get_metadata()["weight_paths"]


def path_of(variable: nnx.Variable) -> tuple[str, ...]:
    """Returns the path of a sharded weight in the `nnx.state` of the model that was sharded."""
    return paths_of(variable)[0]


def weight_paths(model: nnx.Module) -> tuple[tuple[str, ...], ...]:
    """Returns all paths that `shard` recorded for the weights of a model, and those that other variables have copied
    with a weight's metadata. A path may occur more than once."""
    variables = (node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable))
    return tuple(path for v in variables if "weight_paths" in v.get_metadata() for path in paths_of(v))
