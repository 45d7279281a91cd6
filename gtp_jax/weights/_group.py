"""Kernels that share a gather, and everything that is decided about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np

from ..formats import Format, Operands, QuantizedArray, WireFormat
from ..layout import ArrayLayout, Layout
from ._fused import in_order, use_rows
from ._grad_reduce import GradReduce, Reduction, reduction_of

# Where a module is in a model, or within its layer of a stack: so fused weights are named.
ModulePath = tuple[Hashable, ...]


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
    grad_reduce: GradReduce
    codes_multiply: bool = False
    wire: WireFormat | None = None
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
    def summed(self) -> Reduction:
        """What `grad_reduce` means for it."""
        found = reduction_of(self.grad_reduce, self.dtype)
        # no product of gtp_jax's own takes the gradient of an array of any shape: it has the dtype of the array
        return found if self.array is None else found._replace(slot=self.dtype)

    @property
    def exchanged(self) -> Format | np.dtype | None:
        """Returns what each rank sends the others of its gradient, to be summed in float32; `None`: it is
        reduce-scattered."""
        return self.summed.wire if self.reduction is None else self.reduction

    @property
    def stored_sums(self) -> np.dtype:
        """dtype in which gradients of shards are summed over the optimizer's axes, on the wire too; where these divide
        nothing, that of the parameters."""
        if not self.divided:
            return self.param_dtypes[0]
        sums = self.summed.sums
        exchanged = self.exchanged is not None and self.ranks > 1  # which sums in float32
        return np.dtype(jnp.promote_types(sums, jnp.float32)) if exchanged else sums

    def slot(self, weight: jax.Array | QuantizedArray) -> jax.Array | None:
        """Returns zeros, where the gradient of a gathered weight goes; `None` where its own gradient has the dtype, or
        it has none."""
        if isinstance(weight, QuantizedArray):
            return jnp.zeros(weight.shape, self.summed.slot)
        if self.frozen or weight.dtype == self.summed.slot:
            return None
        return jnp.zeros(weight.shape, self.summed.slot)

    @property
    def of_shards(self) -> WeightGroup:
        """Returns the same of weights stored as shards: their gradients are not summed over the optimizer's axes."""
        return dataclasses.replace(self, layouts=tuple(layout.of_shards for layout in self.layouts))
