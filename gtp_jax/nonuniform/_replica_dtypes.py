"""In which dtype weights and gradients travel between the core and replicas of unequal degree.

A weight that is multiplied in bfloat16 is rounded on its way there anyway: rounded ahead of the transfer, as ZeRO does
ahead of its gather, it gives the same step, bit for bit. A gradient travels in the dtype in which a step on one mesh
sums it over the optimizer's axes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import jax
import numpy as np

from ..nn import ModelDef, structure_of, weight_owners
from ..recipes import Recipe
from ..train import ReduceOverDp
from ..weights import ModulePath, WeightGroup, resolve

Tree = Any


class ReplicaDtypes(NamedTuple):
    """What travels of a model's parameters.

    Attributes:
        weights: dtype of each leaf on its way to a replica.
        gradients: dtype of each leaf's gradient on its way back, and in the sum over replicas.
        rounded: modules whose weights travel in a narrower dtype than they are stored in.
    """

    weights: tuple[np.dtype, ...]
    gradients: tuple[np.dtype, ...]
    rounded: frozenset[ModulePath]


def replica_dtypes_of(
    core: ModelDef, params: Tree, recipe: Recipe | None, reduce_over_dp: ReduceOverDp = "each"
) -> ReplicaDtypes:
    """Returns the dtypes in which leaves travel: narrower than they are stored only where no bit of a weight in use is
    another for it, and where gradients are summed over replicas in that dtype on one mesh too.

    Weights that a recipe quantizes travel as they are stored, as codes are made of them.

    Args:
        core: of the model on the core.
        params: arrays, or their shapes and dtypes.
        recipe: what is quantized.
        reduce_over_dp: as in `train_step`; the sum of all microbatches keeps its dtype with `"last"`.
    """
    leaves, tree = jax.tree.flatten(params)
    decided: dict[ModulePath, list[WeightGroup]] = defaultdict(list)
    for (path, _), group in resolve(structure_of(core.model(params)), recipe).items():
        decided[path].append(group)
    numbered = core.model(jax.tree.unflatten(tree, range(len(leaves))))
    weights, gradients = ([np.dtype(leaf.dtype) for leaf in leaves] for _ in range(2))
    rounded = set()
    for path, owner in weight_owners(numbered).items():
        groups = decided[path]
        for number in (weight.get_raw_value() for weight in owner.weights()):
            stored = np.dtype(leaves[number].dtype)
            used = groups[0].dtype
            if all(one.follows_recipes and one.wire is None for one in groups) and used.itemsize < stored.itemsize:
                weights[number] = used
                rounded.add(path)
            sums = max((one.stored_sums for one in groups), key=lambda dtype: dtype.itemsize)
            if groups[0].divided and reduce_over_dp == "each" and sums.itemsize < stored.itemsize:
                gradients[number] = sums
    return ReplicaDtypes(tuple(weights), tuple(gradients), frozenset(rounded))
