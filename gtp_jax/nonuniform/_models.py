"""Lays out a model on the mesh of a replica. This process need not have any of its devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh

from ..hook import evenly_stored
from ..layout import cut_shape, padded_shape
from ..mesh import Path, with_paths
from ..nn import ModelDef, Split, abstract_model, split_model
from ..variables import split_nodes
from ._layouts import LeafSpecs

Tree = Any


def lay_out(factory: Callable[[nnx.Rngs], nnx.Module], mesh: AbstractMesh) -> Split:
    """Returns the definition of a model on a mesh, and the shapes of its arrays. Needs no devices."""
    with jax.sharding.use_abstract_mesh(mesh):
        return split_model(evenly_stored(abstract_model(factory))[0])


def with_whole_sequences(model_def: ModelDef) -> ModelDef:
    """Returns the same model without sequence parallelism, so that the tensor-parallel degree need not divide
    sequences. It computes the same numbers; between layers, each rank has the whole sequence."""
    model = model_def.template.merged(model_def.variables)
    for _, module in nnx.iter_modules(model):
        if getattr(module, "sequence_parallel", False):
            module.sequence_parallel = False  # pyright: ignore[reportAttributeAccessIssue]
    return dataclasses.replace(model_def, template=split_nodes(model)[0])


def leaf_specs(
    core: ModelDef, params: Tree, replica: ModelDef, dtypes: Sequence[np.dtype] | None = None
) -> list[LeafSpecs]:
    """Returns how the core and a replica store each parameter, or its gradient.

    Args:
        core: the definition of the model on the core.
        params: the parameters, or their shapes and dtypes.
        replica: the definition of the model in the replica.
        dtypes: the dtypes in which the arrays travel; by default those of the parameters.
    """
    return _leaf_specs(params, (core, core.specs), (replica, replica.specs), dtypes)


def frozen_leaf_specs(core: ModelDef, frozen: Tree, replica: ModelDef) -> list[LeafSpecs]:
    """Returns how the core and a replica store each array of the frozen weights: values, or codes and scales.

    Args:
        core: the definition of the model on the core.
        frozen: the frozen weights, or their shapes and dtypes.
        replica: the definition of the model in the replica.
    """
    return _leaf_specs(frozen, (core, core.frozen_specs), (replica, replica.frozen_specs))


def _leaf_specs(
    tree: Tree, core: tuple[ModelDef, Tree], replica: tuple[ModelDef, Tree], dtypes: Sequence[np.dtype] | None = None
) -> list[LeafSpecs]:
    found = []
    specs = [jax.tree.leaves(one) for _, one in (core, replica)]
    leaves = with_paths(tree)
    dtypes = [np.dtype(x.dtype) for _, x in leaves] if dtypes is None else dtypes
    for (path, x), dtype, *own in zip(leaves, dtypes, *specs, strict=True):
        shape = _shape(core[0], path, x.shape, stored=False)
        shapes = tuple(_shape(model_def, path, shape, stored=True) for model_def, _ in (core, replica))
        found.append(LeafSpecs(shape, dtype, own[0], own[1], *shapes))
    return found


def _shape(model_def: ModelDef, path: Path, shape: tuple[int, ...], *, stored: bool) -> tuple[int, ...]:
    """Returns the shape of the array at a path as it is stored, or its logical shape, given either of them."""
    layout = model_def.padded.get(path)
    return shape if layout is None else (padded_shape if stored else cut_shape)(shape, layout)


def check_parameters_only(model_def: ModelDef) -> None:
    """Refuses a model that holds anything but parameters, trained or frozen.

    Raises:
        ValueError: if the model has other variables; the message names the first ones.
    """
    if model_def.state_specs:
        paths = [".".join(path) for path, _ in with_paths(model_def.state_specs)]
        raise ValueError(
            f"the model holds variables other than parameters ({', '.join(paths[:3])}), which every replica of unequal "
            "degree would update separately. Remove batch statistics and modules with random streams, such as "
            "`nnx.Dropout`; adapters (`gtp_jax.nn.lora`) have dropout without one. Or train on one mesh in "
            "`view='global'`, without `replicas`."
        )
