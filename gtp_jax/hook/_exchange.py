"""Sums the gradients of weights over ranks: exchanges them in the format or dtype of a recipe's `grad_wire`, or
reduce-scatters them.

[Note: one gradient per rank]
In global view, XLA sums the gradients of all ranks as part of the product that computes them, so no array holds the
gradient of a single rank. There, nothing can order the sums: XLA reduces a gradient before whatever the gradient waits
for. The next block's compute then hides less of it. Therefore, the hook keeps gradients apart, and sums them itself.
The products that it computes (`_multiply`) return them as the gradient of a slot, which has an additional leading
dimension. This dimension has one entry per rank of the batch, and is sharded over the axes of the batch. In local view,
each rank has its own gradient anyway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ..formats import Format
from ..layout import Matrix, seen_as_matrix
from ..mesh import current_view, degrees
from ..recipes import Recipe
from ..weights import ModulePath, WeightGroup, on_ranks, scatter
from ._matrix import logical_shape
from ._movement import scatter as reduce
from ._path import paths_of
from ._placement import Placement
from ._products import widened
from ._scope import recipe_in_scope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange(Matrix):
    """How the gradients that ranks have of a weight are summed. Each rank divides its gradient into shards, sends each
    shard to the rank that owns it, and sums the shards that it receives. The gradient of a weight that is gathered
    along two dimensions of its matrix is exchanged along one of them, and reduce-scattered along the other.

    Attributes:
        wire: the format or dtype in which gradients are exchanged; they are summed in at least float32. `None` if they
            are reduce-scattered in their own dtype.
    """

    wire: Format | np.dtype | None

    def group(self, dtype: np.dtype) -> WeightGroup:
        """Returns the decisions about a gradient that is exchanged as a `WeightGroup`.

        Args:
            dtype: the dtype of the gradient.
        """
        wide = widened(dtype)
        return WeightGroup(
            layouts=(self.layout,), param_dtypes=(wide,), dtype=wide, grad_reduce="float32", reduction=self.wire
        )


def exchanged(variable: Any, placement: Placement, axes: tuple[str, ...]) -> Exchange | None:
    """Returns how the gradient of a weight is exchanged under the recipe in scope; `None` if it is not exchanged.

    Args:
        variable: the variable of the weight.
        placement: the placement of the weight.
        axes: the axes of the mesh that shard the batch.
    """
    recipe = recipe_in_scope()
    if recipe is None:
        return None
    shape = logical_shape(variable.get_raw_value(), placement)
    return decide_exchange(recipe, paths_of(variable), shape, placement, axes)


def decide_exchange(
    recipe: Recipe,
    paths: Sequence[tuple[str, ...]],
    shape: tuple[int, ...],
    placement: Placement,
    axes: tuple[str, ...],
) -> Exchange | None:
    """Returns how the gradient of a weight is exchanged under a recipe; `None` if it is not exchanged.

    The gradient is exchanged if the recipe has a `grad_wire` for the weight, the weight is gathered, and
    `seen_as_matrix` returns a matrix. In global view, all axes over which the weight is gathered must also be in
    `axes`, because along other axes, all ranks have the same gradient.

    Args:
        recipe: the recipe.
        paths: the weight's paths in the model. The first pattern that matches any of them applies.
        shape: the logical shape of the weight.
        placement: the placement of the weight, for an array of this shape.
        axes: the axes of the mesh that shard the batch.
    """
    wire = recipe.rule_of(paths)[1].reduction
    if wire is None:
        return None
    seen = seen_as_matrix(shape, placement)
    if isinstance(seen, str) or seen.layout.ranks == 1:
        return None
    if current_view() == "global" and not _gathered(placement) <= set(axes):
        return None
    return Exchange(wire=wire, inputs=seen.inputs, layout=seen.layout)


def scattered(variable: Any, placement: Placement, axes: tuple[str, ...]) -> Exchange | None:
    """Returns how the gradient of a weight is reduce-scattered by the hook in global view; `None` if XLA reduces it.

    XLA reduces it if the weight is not gathered, is divided after its gather, or is not seen as a matrix; and on a mesh
    with further axes than `axes`, over which XLA may partition what the model computes.

    Args:
        variable: the variable of the weight.
        placement: the placement of the weight.
        axes: the axes of the mesh that shard the batch.
    """
    others = set(jax.sharding.get_abstract_mesh().axis_names).difference(axes)
    if current_view() != "global" or not placement.gathered or degrees(tuple(others)) > 1:
        return None
    seen = seen_as_matrix(logical_shape(variable.get_raw_value(), placement), placement)
    if isinstance(seen, str) or seen.layout.tensor.ranks > 1:
        return None
    return Exchange(wire=None, inputs=seen.inputs, layout=seen.layout)


def exchange(
    gradients: Mapping[int, jax.Array],
    weights: Sequence[Exchange | None],
    placements: Sequence[Placement],
    axes: tuple[str, ...],
) -> dict[int, jax.Array]:
    """Exchanges gradients, in the view in scope, and returns their sums, the gradients of shards, by number. In local
    view, sums over the axes over which each weight is gathered; in global view, over all axes of the batch.

    Args:
        gradients: the gradients of gathered weights, by number. In local view, each is the gradient of this rank; in
            global view, its leading dimension holds those of all ranks of the batch; see [Note: one gradient per rank].
        weights: how the gradient of each weight is exchanged; `None` for a weight that is left out.
        placements: the placement of each weight.
        axes: the axes of the mesh that shard the batch.
    """
    own = {i: one for i, one in enumerate(weights) if one is not None and i in gradients}
    if not own:
        return {}
    if current_view() != "global":
        return _of_rank(gradients, own, placements)

    def of_ranks(gradients: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
        found = _of_rank({i: gradient[0] for i, gradient in gradients.items()}, own, placements)
        return {i: _over_others(gradient, placements[i], axes) for i, gradient in found.items()}

    into = {i: PartitionSpec(axes, *placements[i].used) for i in own}
    out = {i: placements[i].stored for i in own}
    return on_ranks(of_ranks, (into,), out)({i: gradients[i] for i in own})


def _of_rank(
    gradients: Mapping[int, jax.Array], weights: Mapping[int, Exchange], placements: Sequence[Placement]
) -> dict[int, jax.Array]:
    """Sums each gradient over the axes over which its weight is gathered, and returns the sums for this rank's shards.
    Must be called inside a `shard_map`."""
    found = {i: reduce(gradients[i], placements[i]) for i, one in weights.items() if one.wire is None}
    weights = {i: one for i, one in weights.items() if i not in found}
    groups: dict[ModulePath, WeightGroup] = {(i,): one.group(gradients[i].dtype) for i, one in weights.items()}
    matrices = {i: one.to_matrix(gradients[i]) for i, one in weights.items()}
    fused: dict[ModulePath, jax.Array] = {
        (i,): matrices[i] if one.layout.rows == 0 else matrices[i].T for i, one in weights.items()
    }
    shards = scatter(groups, fused)
    for i in weights:
        whole = placements[i].with_padding(gradients[i].shape)
        sizes = [size // degrees(placements[i].gathered_axes(dim)) for dim, size in enumerate(whole)]
        found[i] = jnp.reshape(shards[i,][0], sizes)
    return found


def _over_others(gradient: jax.Array, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """Sums a shard's gradient over the axes of the batch, except those over which the weight is gathered."""
    others = tuple(axis for axis in axes if axis not in _gathered(placement))
    return lax.psum(gradient, others) if degrees(others) > 1 else gradient


def _gathered(placement: Placement) -> set[str]:
    return {axis for dim in range(placement.ndim) for axis in placement.gathered_axes(dim)}
