"""Reads the paths of a weight in its model. Recipes select weights by these paths.

A weight has several paths if several modules hold it or a module around it. The paths are metadata of the weight's
variable, and therefore part of the keys of JAX's caches. So JAX never reuses a traced program for a weight with other
paths, about which a recipe may decide differently. Because their metadata differ, the variables of different blocks
cannot be stacked.
"""

from __future__ import annotations

from flax import nnx


def paths_of(variable: nnx.Variable) -> tuple[tuple[str, ...], ...]:
    """Returns the paths of a sharded weight in the model that was sharded. Each ends in the name of the variable; the
    first is the path in `nnx.state`."""
    return variable.get_metadata()["weight_paths"]


def path_of(variable: nnx.Variable) -> tuple[str, ...]:
    """Returns the path of a sharded weight in the `nnx.state` of the model that was sharded."""
    return paths_of(variable)[0]


def weight_paths(model: nnx.Module) -> tuple[tuple[str, ...], ...]:
    """Returns all paths of all sharded weights of a model. A path may occur more than once."""
    variables = (node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable))
    return tuple(path for v in variables if "weight_paths" in v.get_metadata() for path in paths_of(v))
