"""Kernels that share a gather, and everything that is decided about them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..collectives import (
    Packed,
    Shards,
    StoredCodes,
    as_shards,
    exchange_gradients,
    gather_codes,
    gather_packed,
    gather_part,
    gather_weight,
    in_order,
    pack_codes,
    part_of,
    reduce_gradient,
    scatter_stored,
    use_rows,
)
from ..formats import Format, Operands, QuantizedArray
from ..layout import ArrayLayout, Layout
from ._grad_reduce import Reduction


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightGroup:
    """The kernels of one module: gathered together into one fused weight, multiplied once.

    Attributes:
        layouts: of the kernels.
        param_dtypes: of each kernel's stored shards.
        dtype: of the weight on the wire and in the matmul, where no format is.
        grad_reduce: how its gradient is summed, unless `reduction` says otherwise.
        codes_multiply: whether the module can multiply codes of one scale as they travel.
        wire: format of the shards on the wire; `None`: `dtype`.
        operands: formats in which the module multiplies; `None`: `dtype`.
        reduction: in what a recipe has each rank's gradient sent, to be summed in float32; `None`: as `grad_reduce`
            says.
        array: of an array of any shape, which is gathered as such: what takes it apart is outside of what backward
            differentiates, which else would save a copy. No recipe says anything about it, as it is not known to be
            multiplied.
        frozen: whether ranks store what travels, codes or an array of `dtype`, and no master: it has no gradient.
            What its module was frozen as counts, and no recipe changes it.
    """

    layouts: tuple[Layout, ...]
    param_dtypes: tuple[np.dtype, ...]
    dtype: np.dtype
    grad_reduce: Reduction
    codes_multiply: bool = False
    wire: Format | None = None
    operands: Operands | None = None
    reduction: Format | np.dtype | None = None
    array: ArrayLayout | None = None
    frozen: bool = False

    @property
    def ranks(self) -> int:
        """Returns how many shards a gather joins."""
        return self.layouts[0].ranks

    @property
    def divided(self) -> bool:
        """Returns whether the optimizer's axes divide its shards in storage."""
        return self.layouts[0].copies > 1

    @property
    def travels(self) -> bool:
        """Returns whether a gather communicates or decodes anything, instead of only casting and joining shards."""
        return self.ranks > 1 or self.divided or self.wire is not None or self.frozen

    @property
    def follows_recipes(self) -> bool:
        """Returns whether a recipe decides about it."""
        return self.array is None and not self.frozen

    @property
    def as_codes(self) -> bool:
        """Returns whether the codes that travel are multiplied as they are."""
        return self.codes_multiply and self.operands is not None and self.operands.weight.block is None

    @property
    def stochastic(self) -> bool:
        """Returns whether gradients are rounded stochastically in its matmuls."""
        return self.operands is not None and self.operands.stochastic

    @property
    def rows_in_blocks(self) -> tuple[int, ...]:
        """Each kernel's rows in a fused weight that is multiplied in formats, filled up with zeros to whole blocks.

        So no block of dgrad, which runs along them, has two kernels' in it. Where the fused weight is rank after rank,
        shards are whole blocks already.
        """
        rows = use_rows(self.layouts)
        block = None if self.operands is None else self.operands.gradient.block
        if (in_order(self.layouts) and self.ranks > 1) or block is None:
            return rows
        run = block[1]
        return (*(-(-one // run) * run for one in rows[:-1]), rows[-1])

    @property
    def exchanged(self) -> Format | np.dtype | None:
        """Returns what each rank sends the others of its gradient, to be summed in float32; `None`: it is
        reduce-scattered."""
        return self.grad_reduce.wire if self.reduction is None else self.reduction

    @property
    def stored_sums(self) -> np.dtype:
        """dtype in which gradients of shards are summed over the optimizer's axes, on the wire too; where these divide
        nothing, that of the parameters."""
        if not self.divided:
            return self.param_dtypes[0]
        sums = self.grad_reduce.sums
        exchanged = self.exchanged is not None and self.ranks > 1  # which sums in float32
        return np.dtype(jnp.promote_types(sums, jnp.float32)) if exchanged else sums

    def slot(self, weight: jax.Array | QuantizedArray) -> jax.Array | None:
        """Returns zeros, where the gradient of a gathered weight goes; `None` where its own gradient has the dtype, or
        it has none."""
        if isinstance(weight, QuantizedArray):
            return jnp.zeros(weight.shape, self.grad_reduce.slot)
        if self.frozen or weight.dtype == self.grad_reduce.slot:
            return None
        return jnp.zeros(weight.shape, self.grad_reduce.slot)


def prepare(group: WeightGroup, sent: Shards | Packed | StoredCodes) -> jax.Array | None:
    """Returns what `gather` would make of shards to send them: cast, rows first, joined. `None` where there is nothing
    to cast, or communication is part of it: then `gather` does it in every pass."""
    if not isinstance(sent, tuple) or group.divided or not group.travels:
        return None
    if all(shard.dtype == group.dtype for shard in sent):
        return None
    return part_of(sent, group.layouts, group.dtype)


def gather(group: WeightGroup, sent: Shards | Packed | StoredCodes | jax.Array) -> jax.Array | QuantizedArray:
    """Returns the fused weight, or its codes where those are multiplied; an array of any shape as such. Called inside a
    `shard_map`.

    Args:
        group: what is gathered.
        sent: this rank's shards, what it stores of them, their codes, or what `prepare` made of them.
    """
    if isinstance(sent, StoredCodes):
        sent = pack_codes(sent, [group.layouts])
    if not isinstance(sent, Packed):
        whole = isinstance(sent, tuple)
        weight = gather_weight(sent, group.layouts, group.dtype) if whole else gather_part(sent, group.layouts)
        return weight if group.array is None else group.array.from_fused(weight)
    if group.as_codes:
        return gather_codes(sent, group.layouts)
    return gather_packed(sent, [group.layouts], group.dtype)[0]


def gather_members(
    groups: Mapping[Any, WeightGroup], packed: Packed | StoredCodes
) -> dict[Any, jax.Array | QuantizedArray]:
    """Returns the fused weights of all members of a buffer, by name, from one gather."""
    if isinstance(packed, StoredCodes):
        packed = pack_codes(packed, [groups[name].layouts for name in packed.members])
    members = [groups[name] for name in packed.members]
    if len(members) == 1:
        return {packed.members[0]: gather(members[0], packed)}
    found = gather_packed(packed, [member.layouts for member in members], members[0].dtype)
    return dict(zip(packed.members, found, strict=True))


def scatter(groups: Mapping[Any, WeightGroup], gradients: Mapping[Any, jax.Array]) -> dict[Any, Shards]:
    """Returns the gradients of what ranks store, from those of fused weights.

    Args:
        groups: by name.
        gradients: this rank's, by the same names.
    """
    return in_param_dtypes(groups, stored_gradients(groups, reduce_gradients(groups, gradients)))


def reduce_gradients(
    groups: Mapping[Any, WeightGroup], gradients: Mapping[Any, jax.Array]
) -> dict[Any, jax.Array | Shards]:
    """Sums the gradients of fused weights over the ranks of a gather, then over the optimizer's axes, which span more
    nodes. What is exchanged alike travels together.

    Returns:
        What `stored_gradients` takes: this rank's part of each, in the dtype of the sum; or shards, where a weight is
        divided further over the optimizer's axes.
    """
    gradients = {name: _fused(group, gradients[name]) for name, group in groups.items()}
    parts: dict[Any, jax.Array] = {}
    together: dict[Any, list[Any]] = defaultdict(list)
    for name, group in groups.items():
        if group.exchanged is not None and group.ranks > 1:
            together[group.exchanged, group.layouts[0].axes].append(name)
        else:
            parts[name] = reduce_gradient(gradients[name], group.layouts, group.grad_reduce.sums)
    for (wire, _), names in together.items():
        layouts = [groups[name].layouts for name in names]
        exchanged = exchange_gradients([gradients[name] for name in names], layouts, wire)
        parts.update(zip(names, exchanged, strict=True))
    divided = {name: group for name, group in groups.items() if group.divided}
    return parts | {name: _shards_of_sum(group, parts[name]) for name, group in divided.items()}


def _shards_of_sum(group: WeightGroup, part: jax.Array) -> Shards:
    """Returns what this rank stores of a gradient, summed over the optimizer's axes."""
    shards = as_shards(part, group.layouts, (part.dtype,) * len(group.layouts))
    return scatter_stored(shards, group.layouts, group.stored_sums, (group.stored_sums,) * len(group.layouts))


def stored_gradients(groups: Mapping[Any, WeightGroup], reduced: Mapping[Any, jax.Array | Shards]) -> dict[Any, Shards]:
    """Returns the gradients of what ranks store, in the dtype of their sums, from what `reduce_gradients` returns."""
    kernels = {name: groups[name].layouts for name in reduced}
    return {
        name: own if isinstance(own, tuple) else as_shards(own, kernels[name], (own.dtype,) * len(kernels[name]))
        for name, own in reduced.items()
    }


def in_param_dtypes(groups: Mapping[Any, WeightGroup], gradients: Mapping[Any, Shards]) -> dict[Any, Shards]:
    """Returns the gradients of what ranks store in the parameters' dtypes."""
    return {
        name: tuple(g.astype(dtype) for g, dtype in zip(own, groups[name].param_dtypes, strict=True))
        for name, own in gradients.items()
    }


def _fused(group: WeightGroup, gradient: jax.Array) -> jax.Array:
    """Returns the gradient of a fused weight, from that of what `gather` returns."""
    if group.array is None:
        return gradient
    matrix = group.array.matrix
    *ahead, rows, cols = matrix.use_shape
    ranks = matrix.ranks if in_order(group.layouts) else 1
    shape = (ranks, *ahead, rows // ranks, cols) if ahead else (rows, cols)
    take = jax.linear_transpose(group.array.from_fused, jax.ShapeDtypeStruct(shape, gradient.dtype))
    return take(jnp.reshape(gradient, group.array.use_shape))[0]
