"""Chooses the dtypes in which weights and gradients travel between the core and replicas of unequal degree.

A weight that is multiplied in bfloat16 has to be rounded anyway. Rounding it before the transfer, as ZeRO does before
its gather, gives the same step bit for bit. A gradient travels in the dtype in which a step on one mesh sums it over
the optimizer's axes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ..formats import MXFP8
from ..nn import ModelDef, groups_of, weight_owners
from ..recipes import Recipe
from ..train import ReduceOverDp
from ..weights import ModulePath, WeightGroup

Tree = Any


class ReplicaDtypes(NamedTuple):
    """The dtypes in which a model's parameters and their gradients travel.

    Attributes:
        weights: the dtype in which each leaf travels to a replica.
        gradients: the dtype in which each leaf's gradient travels back and is summed over replicas.
        rounded: the modules whose weights travel in a narrower dtype than they are stored in.
        coded: the leaves whose gradients a recipe exchanges in MXFP8: by their numbers, the dimension along which
            blocks run. They travel as codes if the replicas and the core store whole blocks (`coded_leaves`), and
            otherwise as `gradients` says.
    """

    weights: tuple[np.dtype, ...]
    gradients: tuple[np.dtype, ...]
    rounded: frozenset[ModulePath]
    coded: Mapping[int, int] = {}


def replica_dtypes_of(
    core: ModelDef,
    params: Tree,
    recipe: Recipe | None,
    reduce_over_dp: ReduceOverDp = "each",
    *,
    frozen: Tree | None = None,
) -> ReplicaDtypes:
    """Returns the dtypes in which parameters and gradients travel.

    A weight travels in a narrower dtype than it is stored in only if that changes no bit of the weight that is
    multiplied. A gradient does so only if a step on one mesh also sums it over replicas in that dtype. Weights that a
    recipe quantizes travel as they are stored, because codes are made from them.

    Args:
        core: the definition of the model on the core.
        params: the parameters, or their shapes and dtypes.
        recipe: the recipe of the step.
        reduce_over_dp: as in `train_step`; with `"last"`, gradients travel in the dtype of the parameters.
        frozen: the frozen weights, or their shapes and dtypes, if there are any. They do not travel in a step.
    """
    leaves, tree = jax.tree.flatten(params)
    decided: dict[ModulePath, list[WeightGroup]] = defaultdict(list)
    for (path, _), group in groups_of(core.model(params, frozen=frozen), recipe).items():
        decided[path].append(group)
    numbered = core.model(jax.tree.unflatten(tree, range(len(leaves))), frozen=frozen)
    weights, gradients = ([np.dtype(leaf.dtype) for leaf in leaves] for _ in range(2))
    rounded, coded = set(), {}
    for path, owner in weight_owners(numbered).items():
        groups = decided[path]
        if groups[0].frozen:
            continue
        for number in (weight.get_raw_value() for weight in owner.weights()):
            stored = np.dtype(leaves[number].dtype)
            used = groups[0].dtype
            if all(one.follows_recipes and one.wire is None for one in groups) and used.itemsize < stored.itemsize:
                weights[number] = used
                rounded.add(path)
            sums = max((one.stored_sums for one in groups), key=lambda dtype: dtype.itemsize)
            if groups[0].divided and reduce_over_dp == "each" and sums.itemsize < stored.itemsize:
                gradients[number] = sums
            if all(one.reduction == MXFP8 for one in groups):
                coded[number] = -1
    return ReplicaDtypes(tuple(weights), tuple(gradients), frozenset(rounded), coded)
