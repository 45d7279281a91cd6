"""Describes kernels that share a gather, with all decisions about them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from .._words import GradReduce
from ..formats import DelayedScaling, Format, QuantizedArray
from ._fused import in_order, use_rows
from ._grad_reduce import Reduction, reduction_of
from ._wire_spec import WireSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightGroup(WireSpec):
    """The kernels of one module, which are gathered together into one fused weight, or one array of any shape, with all
    decisions about them: how they travel (`WireSpec`), and how their gradient is summed.

    Attributes:
        param_dtypes: the dtype of each kernel's stored shards; empty if `frozen`.
        grad_reduce: how its gradient is summed, unless `reduction` overrides it.
        reduction: the format or dtype that a recipe sets for sending each rank's gradient, to be summed in float32;
            `None` if `grad_reduce` decides.
        frozen: whether ranks store what is sent, codes or an array of `dtype`, and no master. The weight then has no
            gradient, and keeps the formats with which its module was frozen, whatever the recipe.
    """

    param_dtypes: tuple[np.dtype, ...]
    grad_reduce: GradReduce
    reduction: Format | np.dtype | None = None
    frozen: bool = False

    @property
    def follows_recipes(self) -> bool:
        """Whether recipes apply to it."""
        return self.array is None and not self.frozen

    @property
    def delayed(self) -> DelayedScaling | None:
        """How its scales follow from the amaxes of earlier steps; `None` if they do not."""
        return None if self.operands is None else self.operands.delayed

    @property
    def stochastic(self) -> bool:
        """Whether gradients are rounded stochastically in its matmuls."""
        return self.operands is not None and self.operands.stochastic

    @property
    def rows_in_blocks(self) -> tuple[int, ...]:
        """The number of rows of each kernel in a fused weight that is multiplied in formats. All kernels but the last
        are padded with zeros to whole blocks.

        A block of dgrad, which runs along the rows, thus never contains rows of two kernels. Nothing is padded if the
        fused weight is in the order of several ranks, because shards of several kernels then consist of whole blocks.
        """
        rows = use_rows(self.layouts)
        block = None if self.operands is None else self.operands.gradient.block
        if (in_order(self.layouts) and self.ranks > 1) or block is None:
            return rows
        run = block[1]
        return (*(-(-one // run) * run for one in rows[:-1]), rows[-1])

    @property
    def summed(self) -> Reduction:
        """The dtypes that `grad_reduce` stands for."""
        found = reduction_of(self.grad_reduce, self.dtype)
        # gtp_jax's products do not compute the gradient of an array of any shape, which therefore has the array's dtype
        return found if self.array is None else found._replace(slot=self.dtype)

    @property
    def exchanged(self) -> Format | np.dtype | None:
        """The format or dtype in which each rank sends its gradient in an all-to-all, to be summed in float32; `None`
        if the gradient is reduce-scattered."""
        return self.summed.wire if self.reduction is None else self.reduction

    @property
    def stored_sums(self) -> np.dtype:
        """The dtype in which gradients of shards are sent and summed over the optimizer's axes; the dtype of the
        parameters if these axes do not divide the shards."""
        if not self.divided:
            return self.param_dtypes[0]
        sums = self.summed.sums
        exchanged = self.exchanged is not None and self.ranks > 1  # exchanged gradients are summed in float32
        return np.dtype(jnp.promote_types(sums, jnp.float32)) if exchanged else sums

    def slot(self, weight: jax.Array | QuantizedArray) -> jax.Array | None:
        """Returns zeros that receive the gradient of a gathered weight; `None` for an array that is frozen, or whose
        own gradient has the required dtype. Codes always have a slot; if they are frozen, its gradient is dropped."""
        if isinstance(weight, QuantizedArray):
            *lead, rows, cols = weight.shape
            if self.has_experts:  # codes may be in the order of kernels, but gradients are in that of ranks
                ranks = self.ranks if in_order(self.layouts) else 1
                lead, rows = [ranks, *lead[1:]], lead[0] * rows // ranks
            return jnp.zeros((*lead, rows, cols), self.summed.slot)
        if self.frozen or weight.dtype == self.summed.slot:
            return None
        return jnp.zeros(weight.shape, self.summed.slot)

    @property
    def cut_late(self) -> bool:
        """Whether a chain gathers the weight with the padding of its shards, and cuts it where a layer uses it."""
        padded = bool(self.layouts[0].shard_padding.size)
        return padded and self.wire is None and self.array is None and in_order(self.layouts)

    @property
    def with_padding(self) -> WeightGroup:
        """The group of the stored arrays, whose padding counts as part of the weights."""
        return dataclasses.replace(self, layouts=tuple(layout.with_padding for layout in self.layouts))

    @property
    def of_rank(self) -> WeightGroup:
        """The group of the rows that one rank sends in a gather, as a weight of its own that is not gathered."""
        return dataclasses.replace(self, layouts=tuple(layout.of_rank for layout in self.layouts))

    @property
    def of_shards(self) -> WeightGroup:
        """The group of the same weights if whole shards are stored: gradients are not summed over the optimizer's
        axes."""
        return dataclasses.replace(self, layouts=tuple(layout.of_shards for layout in self.layouts))
