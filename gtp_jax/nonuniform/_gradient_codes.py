"""Sends gradients between replicas as MXFP8 codes, if a recipe exchanges gradients in MXFP8 (`grad_wire`).

A replica rounds its gradient once, in blocks of 32 along the last dimension of the stored array, or along the one
before it if devices do not store whole blocks of the last. Its codes and scales move to the core, which exchanges them
over replicas. There, each rank decodes its part of every replica's gradient and adds these parts up in float32, so sums
are not rounded to codes. See [Note: error] in `gtp_jax/weights/_exchange.py`.
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientCodes:
    """Holds a gradient as it travels.

    Attributes:
        codes: E4M3 codes, uint8, in the shape of the gradient.
        scales: a power of two for each block, uint8; `dim` has a 32nd of the gradient's size.
        dim: the dimension along which blocks of 32 elements share a scale: -1 or -2.
    """

    codes: jax.Array
    scales: jax.Array
    dim: int = dataclasses.field(metadata={"static": True})


def coded_leaves(
    wanted: Collection[int], core: ModelDef, params: Tree, plan: FaultPlan, replicas: Sequence[ModelDef]
) -> dict[int, int]:
    """Returns the leaves whose gradients can travel as codes, by number, with the dimension of their blocks.

    Every core axis of more than one rank, and dp in any case, must divide the leaf. Neither the core nor a replica may
    cut a block. The dimension is -1 if that allows it, and otherwise -2.

    Args:
        wanted: the numbers of the leaves to choose from.
        core: the definition of the model on the core.
        params: the parameters, or their shapes and dtypes.
        plan: the plan.
        replicas: the definition of the model in each replica.
    """
    dims = {number: [-1, -2] for number in wanted}
    of_core = {DP: len(plan.replicas), GTP: plan.gtp, TP: plan.core_tp}
    needed = {DP, *(axis for axis, size in of_core.items() if size > 1)}
    for replica, model_def in zip(plan.replicas, replicas, strict=True):
        sides = of_core, {DP: 1, GTP: plan.gtp, TP: replica.tp}
        leaves = leaf_specs(core, params, model_def)
        for number, left in dims.items():
            leaf = leaves[number]
            if len(leaf.shape) < 2 or not needed <= axes_of(leaf.core):
                dims[number] = []
                continue
            stored = zip((leaf.core_shape, leaf.replica_shape), (leaf.core, leaf.replica), sides, strict=True)
            parts = [leaf.shape, *(_part(*one) for one in stored)]
            dims[number] = [dim for dim in left if not any(part[dim] % _BLOCK for part in parts)]
    return {number: left[0] for number, left in dims.items() if left}


def _part(shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[Any, int]) -> tuple[int, ...]:
    """Returns the shape of the part that a device stores."""
    return shape_of(box_of(shape, spec, sizes, dict.fromkeys(sizes, 0)))


def sent_back(leaves: Sequence[LeafSpecs], coded: Mapping[int, int]) -> list[LeafSpecs]:
    """Returns the arrays that travel for these gradients: codes and scales for those that are coded, along the given
    dimensions."""
    found = []
    for number, leaf in enumerate(leaves):
        if number not in coded:
            found.append(leaf)
            continue
        byte = np.dtype(np.uint8)
        shapes = {
            name: _of_scales(getattr(leaf, name), coded[number]) for name in ("shape", "core_shape", "replica_shape")
        }
        found += [dataclasses.replace(leaf, dtype=byte), dataclasses.replace(leaf, dtype=byte, **shapes)]
    return found


def _of_scales(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return tuple(size // _BLOCK if d == len(shape) + dim else size for d, size in enumerate(shape))


def encoded(gradient: jax.Array, sharding: NamedSharding, dim: int) -> GradientCodes:
    """Returns the codes of a gradient that is sharded in whole blocks along a dimension: -1 or -2."""

    def local(gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = quantize(jnp.swapaxes(gradient.astype(jnp.float32), dim, -1), MXFP8)
        assert found.scales is not None
        return jnp.swapaxes(found.codes, dim, -1), jnp.swapaxes(found.scales, dim, -1)

    spec = sharding.spec
    codes, scales = jax.shard_map(local, in_specs=spec, out_specs=(spec, spec), check_vma=False)(gradient)
    return GradientCodes(codes, scales, dim)


def sum_of_codes(gradient: GradientCodes, dim: int, replicas: int) -> jax.Array:
    """Returns this rank's part of the sum over replicas, in float32. Called inside a `shard_map` over the core.

    Args:
        gradient: the codes of this replica's gradient.
        dim: the dimension that replicas divide.
        replicas: the number of replicas.
    """
    each = [lax.all_to_all(a, DP, split_axis=dim, concat_axis=dim, tiled=True) for a in jax.tree.leaves(gradient)]
    rows, scales = (jnp.swapaxes(a, gradient.dim, -1) for a in each)
    values = dequantize(QuantizedArray(rows, scales, None, MXFP8, (rows.shape[-2], rows.shape[-1])))
    values = jnp.swapaxes(values, gradient.dim, -1)
    shape = values.shape
    parts = jnp.reshape(values.astype(jnp.float32), (*shape[:dim], replicas, shape[dim] // replicas, *shape[dim + 1 :]))
    return jnp.sum(parts, axis=dim)
