"""The matmul of a dense layer in FP8 with blocks of 128: forward, dgrad and wgrad."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Float

from ...formats import FP8_BLOCKS, FP8_BLOCKS_1D, QuantizedArray
from .._implementation import Implementation
from .._operand import quantizable, rows_of
from .._order import Order, by_kernels, by_parts, in_whole_tiles
from .._quantize import blocked_product, quantize_blocked, transposed
from .._save import save_for_backward
from .._slot import SlottedWeight
from ._products import Gradient, linear_rounded


def linear_fp8_blocks(
    x: Float[jax.Array, "*rows features_in"],
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight,
    order: Order | None = None,
    *,
    implementation: Implementation | None = None,
) -> Float[jax.Array, "*rows features_out"]:
    """Returns `x @ weight.T` of operands rounded to E4M3 in blocks of 128, as DeepSeek-V3 was trained (arXiv
    2412.19437).

    | product | operands, and their blocks |
    |---|---|
    | forward | input in 1 x 128 along features in; weight in 128 x 128 |
    | dgrad | gradient in 1 x 128 along features out; the same codes of the weight, transposed |
    | wgrad | gradient and input in 1 x 128 along tokens, each rounded from the values |

    Scales that are made here are powers of two, rounded down, so that nothing saturates. Sums are promoted to float32
    every 128 elements; see `blocked_product`. On Hopper, cuBLASLt multiplies the codes. Elsewhere, their values are
    multiplied in at least float32, which serves to study numerics, not speed.

    Args:
        x: `(..., features_in)`, bfloat16, float16, float32, or float64, which is rounded to float32 first.
        weight: `(features_out, features_in)`, of the same dtype, which is quantized here. With a slot, it is the codes
            in which the weight was sent (`FP8_BLOCKS`, row-wise), or values.
        order: the order of the rows of codes of several kernels; `None` if tiles begin at every 128th row.
        implementation: as in `blocked_product`.

    Returns:
        `(..., features_out)`, of the same dtype. `x` is saved for backward.

    Raises:
        NotImplementedError: as in `blocked_product`.
    """
    return linear_rounded(x, weight, TileProducts(order, implementation))


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("order", "implementation"))
@dataclasses.dataclass(frozen=True)
class TileProducts:
    """Rounds operands to E4M3 in blocks of 128; see `linear_fp8_blocks`.

    Parts of a sequence have the codes of the whole if they consist of whole blocks of 128 tokens.

    Attributes:
        order: the order of the rows of codes of several kernels; `None` if tiles begin at every 128th row.
        implementation: as in `blocked_product`.
    """

    order: Order | None = None
    implementation: Implementation | None = None

    @property
    def name(self) -> str:
        return "linear_fp8_blocks"

    def weight_and_slot(self, weight: jax.Array | SlottedWeight) -> tuple[QuantizedArray, jax.Array]:
        codes, slot = weight if isinstance(weight, SlottedWeight) else (weight, weight)
        if not isinstance(codes, QuantizedArray):
            (codes,) = quantize_blocked(quantizable(lax.stop_gradient(codes)), FP8_BLOCKS, "row")
        return codes, slot

    def of_inputs(self, parts: Sequence[jax.Array], backward: bool) -> tuple[list[QuantizedArray], list[Any]]:
        del backward
        return [quantize_blocked(rows_of(x), FP8_BLOCKS_1D, "row")[0] for x in parts], list(parts)

    def for_wgrad(self, saved: jax.Array) -> QuantizedArray:
        return quantize_blocked(rows_of(saved), FP8_BLOCKS_1D, "column")[0]

    def of_gradients(self, parts: Sequence[jax.Array]) -> list[Gradient]:
        return [self._of_gradient(rows_of(part)) for part in parts]

    def _of_gradient(self, rows: jax.Array) -> Gradient:
        if (of_kernels := by_kernels(rows, self.order)) is rows:
            along_out, along_tokens = quantize_blocked(rows, FP8_BLOCKS_1D, "both")
        else:
            (along_out,) = quantize_blocked(of_kernels, FP8_BLOCKS_1D, "row")
            (along_tokens,) = quantize_blocked(rows, FP8_BLOCKS_1D, "column")
        return along_out, along_tokens

    def forward(self, weight: QuantizedArray, dtype: np.dtype) -> Callable[[QuantizedArray], jax.Array]:
        tiles, order, how = in_whole_tiles(weight, self.order), self.order, self.implementation
        # named, because the kernel is no `dot_general`, which policies save
        return lambda codes: save_for_backward(by_parts(blocked_product(codes, tiles, dtype, how), order))

    def dgrad(self, weight: QuantizedArray, dtype: np.dtype) -> Callable[[QuantizedArray], jax.Array]:
        tiles, how = transposed(in_whole_tiles(weight, self.order)), self.implementation
        return lambda codes: blocked_product(codes, tiles, dtype, how)

    def wgrad(self, gradient: QuantizedArray, x: QuantizedArray, dtype: np.dtype, out: np.dtype) -> jax.Array:
        del dtype
        return blocked_product(gradient, x, out, self.implementation)
