"""Reads the path of a weight in its model, by which recipes select the weight.

The path is metadata of the weight's variable, and therefore part of the keys of JAX's caches: a traced program is never
reused for a weight for which a recipe decides differently, wherever the recipe comes into scope. For the same reason,
variables of different blocks cannot be stacked.
"""

from __future__ import annotations

from flax import nnx


def path_of(variable: nnx.Variable) -> tuple[str, ...]:
    """Returns the path of a sharded weight in the model that was sharded; it ends in the name of the variable."""
    return variable.get_metadata()["weight_path"]


def weight_paths(model: nnx.Module) -> tuple[tuple[str, ...], ...]:
    """Returns the paths of the weights of a model that `shard` has sharded."""
    variables = (node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable))
    return tuple(path_of(v) for v in variables if "weight_path" in v.get_metadata())
