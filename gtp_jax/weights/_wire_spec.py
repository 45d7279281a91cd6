"""Describes kernels that share a gather, with what their wire depends on."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import numpy as np

from ..formats import Operands, Tiled, WireFormat
from ..layout import ArrayLayout, Layout
from ..ops import Order
from ._fused import in_order, use_rows

# The path of a module in its model, or within its layer of a stack. It names the module's fused weight.
ModulePath = tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WireSpec:
    """The kernels of one fused weight, or one array of any shape, with the decisions about how they travel: all that a
    `Wire` depends on.

    Attributes:
        layouts: the layouts of the kernels.
        dtype: the dtype of the weight on the wire and in the matmul, where no format applies.
        wire: the format of the shards on the wire; `None` for `dtype`.
        operands: the formats in which the weight is multiplied; `None` for `dtype`.
        codes_multiply: whether the module can multiply codes as they travel: with a single scale or in tiles.
        array: the layout of an array of any shape; `None` for kernels. The gather returns the array in its own shape,
            because a conversion within the differentiated function would save a copy for backward. No recipe applies
            to the array, because it is not known to be multiplied.
    """

    layouts: tuple[Layout, ...]
    dtype: np.dtype
    wire: WireFormat | None = None
    operands: Operands | None = None
    codes_multiply: bool = False
    array: ArrayLayout | None = None

    @property
    def ranks(self) -> int:
        """The number of shards that a gather joins."""
        return self.layouts[0].ranks

    @property
    def divided(self) -> bool:
        """Whether the optimizer's axes divide its shards in storage."""
        return self.layouts[0].copies > 1

    @property
    def travels(self) -> bool:
        """Whether a gather communicates or decodes anything, instead of only casting and joining shards."""
        return self.ranks > 1 or self.divided or self.wire is not None

    @property
    def has_experts(self) -> bool:
        """Whether its kernels are stacks of matrices, as those of experts are."""
        return len(self.layouts[0].shape) > 2

    @property
    def as_codes(self) -> bool:
        """Whether a gather returns codes instead of decoded values."""
        if not self.codes_multiply or self.operands is None:
            return False
        return self.operands.weight.block is None or isinstance(self.wire, Tiled)

    @property
    def order(self) -> Order | None:
        """The order of the rows of gathered codes in tiles; `None` if it is that of other fused weights and tiles begin
        at every 128th row."""
        assert isinstance(self.wire, Tiled)
        if len(self.layouts) == 1:
            return None
        rows, run = use_rows(self.layouts), self.wire.format.run[0]
        ranks = self.ranks if in_order(self.layouts) else 1
        each = rows[:-1] if ranks == 1 else [one // ranks for one in rows]
        return Order(rows, ranks) if any(one % run for one in each) else None
