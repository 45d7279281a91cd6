"""Sends gradients between replicas as MXFP8 codes, if a recipe exchanges gradients in MXFP8 (`grad_wire`).

A replica rounds its gradient once, in blocks of 32 along the last dimension of the stored array. Its codes and scales
move to the core, which exchanges them over replicas. There, each rank decodes its part of every replica's gradient and
adds these parts up in float32, so sums are not rounded to codes. See [Note: error] in `gtp_jax/weights/_exchange.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..formats import MXFP8, QuantizedArray
from ..mesh import DP, GTP, TP, axes_of
from ..nn import ModelDef
from ..ops import dequantize, quantize
from ._boxes import box_of, shape_of
from ._faults import FaultPlan
from ._layouts import LeafSpecs
from ._models import leaf_specs

assert MXFP8.block is not None
_BLOCK = MXFP8.block[1]

Tree = Any

# The codes and the scales of a gradient.
Codes = tuple[jax.Array, jax.Array]


def coded_leaves(
    wanted: Collection[int], core: ModelDef, params: Tree, plan: FaultPlan, replicas: Sequence[ModelDef]
) -> frozenset[int]:
    """Returns the leaves whose gradients can travel as codes: those that all axes of the core divide, and whose blocks
    neither the core nor a replica cuts.

    Args:
        wanted: the numbers of the leaves to choose from.
        core: the definition of the model on the core.
        params: the parameters, or their shapes and dtypes.
        plan: the plan.
        replicas: the definition of the model in each replica.
    """
    found = set(wanted)
    of_core = {DP: len(plan.replicas), GTP: plan.gtp, TP: plan.core_tp}
    needed = {DP, *(axis for axis, size in of_core.items() if size > 1)}
    for replica, model_def in zip(plan.replicas, replicas, strict=True):
        sides = of_core, {DP: 1, GTP: plan.gtp, TP: replica.tp}
        for number, leaf in enumerate(leaf_specs(core, params, model_def)):
            shapes = leaf.core_shape, leaf.replica_shape
            widths = [_width(*one) for one in zip(shapes, (leaf.core, leaf.replica), sides, strict=True)]
            widths += leaf.shape[-1:]
            if len(leaf.shape) < 2 or not needed <= axes_of(leaf.core) or any(width % _BLOCK for width in widths):
                found.discard(number)
    return frozenset(found)


def _width(shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[Any, int]) -> int:
    """Returns the part of the last dimension that a device stores; 0 for a scalar."""
    return shape_of(box_of(shape, spec, sizes, dict.fromkeys(sizes, 0)))[-1] if shape else 0


def sent_back(leaves: Sequence[LeafSpecs], coded: Collection[int]) -> list[LeafSpecs]:
    """Returns the arrays that travel for these gradients: codes and scales for those that are coded."""
    found = []
    for number, leaf in enumerate(leaves):
        if number not in coded:
            found.append(leaf)
            continue
        byte = np.dtype(np.uint8)
        scales = {
            name: (*shape[:-1], shape[-1] // _BLOCK)
            for name in ("shape", "core_shape", "replica_shape")
            for shape in [getattr(leaf, name)]
        }
        found += [dataclasses.replace(leaf, dtype=byte), dataclasses.replace(leaf, dtype=byte, **scales)]
    return found


def encoded(gradient: jax.Array, sharding: NamedSharding) -> Codes:
    """Returns the codes of a gradient that is sharded in whole blocks."""

    def local(gradient: jax.Array) -> Codes:
        found = quantize(gradient.astype(jnp.float32), MXFP8)
        assert found.scales is not None
        return found.codes, found.scales

    spec = sharding.spec
    return jax.shard_map(local, in_specs=spec, out_specs=(spec, spec), check_vma=False)(gradient)


def sum_of_codes(codes: Codes, dim: int, replicas: int) -> jax.Array:
    """Returns this rank's part of the sum over replicas, in float32. Called inside a `shard_map` over the core.

    Args:
        codes: the codes of this replica's gradient.
        dim: the dimension that replicas divide.
        replicas: the number of replicas.
    """
    each = [lax.all_to_all(a, DP, split_axis=dim, concat_axis=dim, tiled=True) for a in codes]
    values = dequantize(QuantizedArray(each[0], each[1], None, MXFP8, each[0].shape[-2:]))
    shape = values.shape
    parts = jnp.reshape(values.astype(jnp.float32), (*shape[:dim], replicas, shape[dim] // replicas, *shape[dim + 1 :]))
    return jnp.sum(parts, axis=dim)
