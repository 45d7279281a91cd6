"""Computes products with weights on every rank: in a recipe's formats, or so that each rank has its own gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ..formats import FP8_BLOCKS, Operands
from ..mesh import current_view, degrees
from ..ops import SlottedWeight, linear, linear_blocks, linear_fp8, linear_fp8_blocks, linear_fp8_delayed
from ..weights import CallKeys, Scaling, in_view
from ._codes import Coded
from ._matrix import Matrix, in_order_of, turned
from ._products import Array, Factor, values_of


def multiplies(coded: Coded | None, factor: Factor) -> bool:
    """Returns whether a product with a weight is computed in a recipe's formats.

    The recipe must ask for it. If the format has blocks, or tensor ranks divide the gathered weight, the product must
    also satisfy `in_order_of` or `turned`. If the blocks are not square, it must satisfy `in_order_of`, because the
    blocks must run along the contracted features.
    """
    if coded is None or coded.operands is None:
        return False
    block = coded.operands.weight.block
    if block is None and coded.layout.tensor.ranks == 1:
        return True
    return in_order_of(coded, factor) or (turned(coded, factor) and (block is None or block[0] == block[1]))


def ranks_know(seen: Matrix, factor: Factor) -> bool:
    """Returns whether each rank can compute its part of a product with a weight. If tensor ranks divide the gathered
    weight, the product must satisfy `in_order_of` or `turned`."""
    return seen.layout.tensor.ranks == 1 or in_order_of(seen, factor) or turned(seen, factor)


def axes_in_scope(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes of a role, without those that the mesh in scope lacks."""
    return tuple(axis for axis in axes if axis in jax.sharding.get_abstract_mesh().axis_names)


def product(
    x: jax.Array,
    weight: Array,
    seen: Matrix,
    operands: Operands | None,
    factor: Factor,
    batch: tuple[str, ...],
    sequence: tuple[str, ...],
    key: jax.Array,
    scaling: Scaling | None = None,
) -> jax.Array:
    """Returns `x @ weight.T`, in the view in scope. Every rank multiplies its own part of `x`, which may be all of it.

    Args:
        x: the other operand, `(..., contracted features)`. If it has two or more dimensions, the first counts as the
            batch dimension, and the second of three or more as the sequence. In global view, the first is sharded if
            the ranks of `batch` divide it evenly, and the second if those of `sequence` do.
        weight: the gathered weight, `(kept features, contracted features)`; if it is quantized, the values of its
            codes. If its slot has an additional leading dimension, the slot receives one gradient for each rank of
            `batch`.
        seen: how the weight is seen as a matrix. `ranks_know(seen, factor)` must be true.
        operands: the formats to which operands are rounded; `None` to round nothing. If there are formats, `multiplies`
            must be true for the weight and `factor`.
        factor: the weight as a factor of the product.
        batch: the mesh axes that shard the batch; those that the mesh in scope lacks do not count.
        sequence: the mesh axes that divide the tokens of each example; those that the mesh in scope lacks do not count.
        key: the key of stochastic rounding, uint32 `(2,)`. In global view, if products round stochastically, ranks with
            different parts of the operands derive different keys from it.
        scaling: the scaling by amaxes of earlier steps, with a slot in float32; `None` if products are not scaled so.
    """
    inner, outer = tuple(seen.used)
    if turned(seen, factor):
        inner, outer = outer, inner
    names = axes_in_scope(batch)
    divided = x.ndim > 1 and x.shape[0] % degrees(names) == 0
    parts = axes_in_scope(sequence) if x.ndim > 2 else ()
    parts = parts if parts and x.shape[1] % degrees(parts) == 0 else ()
    tokens = (names if divided else None, parts or None, *[None] * (x.ndim - 3))[: max(0, x.ndim - 1)]
    parted = (*(names if divided else ()), *parts, *(axis for axis in (inner, outer) if axis is not None))
    in_global = current_view() == "global"
    by_rank = parted if in_global and operands is not None and operands.stochastic else ()
    # each of the ranks that compute the same part of `y` receives an equal share of its gradient
    shares = jax.sharding.get_abstract_mesh().size // degrees(parted) if in_global else 1
    apart = isinstance(weight, SlottedWeight) and weight.slot.ndim > values_of(weight).ndim

    def multiply(x: jax.Array, weight: Array, key: jax.Array, scaling: Scaling | None) -> jax.Array:
        if apart:
            assert isinstance(weight, SlottedWeight)
            weight = SlottedWeight(weight.values, weight.slot[0])
        if operands is None:
            y = linear(x, weight, factor.precision)
        elif operands.delayed is not None:
            assert scaling is not None, "delayed scaling without a state"
            of_rank = np.array([1, 1, shares], np.float32)
            slot = scaling.slot * of_rank[1:]
            y = linear_fp8_delayed(x, weight, scaling.amaxes / of_rank, slot, operands.gradient)
        elif operands.weight.block is None:
            y = linear_fp8(x, weight, operands.gradient, keep_codes=operands.keep_codes)
        elif operands.weight == FP8_BLOCKS:
            y = linear_fp8_blocks(x, weight)
        else:
            key = CallKeys(key).of_rank(lax.axis_index(by_rank).astype(jnp.uint32)).next() if by_rank else key
            y = linear_blocks(x, weight, key, operands)
        return y if inner is None else lax.psum(y, inner)

    own: Any = PartitionSpec(outer, inner)
    own = SlottedWeight(own, PartitionSpec(names, outer, inner)) if apart else own  # pyright: ignore[reportArgumentType]
    into = PartitionSpec(*tokens, inner), own, PartitionSpec(), None if scaling is None else Scaling.specs()
    return in_view(multiply, lambda *_: into, PartitionSpec(*tokens, outer))(x, weight, key, scaling)
