"""The matmul of a dense layer in block formats: forward, dgrad and wgrad."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Float32, UInt32

from ...formats import Format, Operands, QuantizedArray
from ...mesh import supports_block_scaled_matmul
from .._implementation import Implementation, runs_native
from .._operand import operand_amax, rounded_weight, rows_of, tensor_unit, values_of
from .._quantize import hadamard_amax, multi_amax, quantize
from .._save import save_for_backward
from .._slot import SlottedWeight, values_and_slot
from ._products import Gradient, linear_rounded

_DTYPES: dict[str | None, Any] = {
    "e2m1": jnp.float4_e2m1fn,
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "e8m0": jnp.float8_e8m0fnu,
}


def linear_blocks(
    x: Float[jax.Array, "*rows features_in"],
    weight: Float[jax.Array, "features_out features_in"] | SlottedWeight,
    key: UInt32[jax.Array, " 2"],
    operands: Operands,
    *,
    implementation: Implementation | None = None,
) -> Float[jax.Array, "*rows features_out"]:
    """Returns `x @ weight.T` of operands rounded to block formats, in blocks along each product's contraction.

    | product | operands, and the dimension along which their blocks run |
    |---|---|
    | forward | input along features in, weight as it was sent |
    | dgrad | gradient along features out, weight along features out |
    | wgrad | gradient along tokens, input along tokens; both transformed if `operands.hadamard` |

    These are the numerics of MXFP8 (arXiv 2506.08027) and NVFP4 (arXiv 2509.25149) training on hardware with
    block-scaled matmuls. The scales of whole tensors are powers of two. So the product of a token does not depend on
    the other tokens on this rank or in this microbatch (except for underflow). Also, every rounded value is exact in
    bfloat16, so a bfloat16 matmul with sums in float32 equals that of the codes and scales. The amax of an operand is
    that of this rank's part.

    The weight is not rounded again if its blocks serve both directions. In MXFP8, dgrad needs blocks along the other
    dimension, so the values that were sent are quantized again. Because both sets of values are E4M3 times a power of
    two, this changes only values that are over 14,000 times smaller than the largest of their block. Apart from those,
    dgrad is the same as with codes made from the master weights, which is what the recipe specifies.

    Args:
        x: `(..., features_in)`, bfloat16, float16, float32, or float64, which is rounded to float32 first.
        weight: `(features_out, features_in)`, of the same dtype, already rounded to `operands.weight`, as it was sent.
        key: uint32 `(2,)`, for stochastic rounding.
        operands: the formats.
        implementation: `"native"` multiplies codes and scales with `jax.nn.scaled_matmul`, on GPUs that support it;
            `"reference"` multiplies their values; `None` uses the best available.

    Returns:
        `(..., features_out)`, of the same dtype. The codes of `x` are saved for backward.

    Raises:
        TypeError: if `weight` is codes.
        NotImplementedError: if `implementation` is `"native"`, and the GPUs do not multiply codes and scales.
    """
    return linear_rounded(x, weight, BlockProducts.of(key, operands, implementation))


@functools.partial(jax.tree_util.register_dataclass, data_fields=("key",), meta_fields=("operands", "scaled"))
@dataclasses.dataclass(frozen=True)
class BlockProducts:
    """Rounds operands to block formats; see `linear_blocks`.

    Parts of a sequence have the codes of the whole if they consist of whole blocks of tokens, and formats have no amax.

    Attributes:
        key: uint32 `(2,)`, for stochastic rounding.
        operands: the formats.
        scaled: whether to multiply codes and scales, instead of their values.
    """

    key: jax.Array
    operands: Operands
    scaled: bool

    @classmethod
    def of(cls, key: jax.Array, operands: Operands, implementation: Implementation | None = None) -> BlockProducts:
        """Returns the products that `implementation` runs; see `linear_blocks`."""
        missing = "" if supports_block_scaled_matmul() else "only B200 and B300 GPUs multiply codes and block scales"
        return cls(key, operands, runs_native("linear_blocks", implementation, missing))

    @property
    def name(self) -> str:
        return "linear_blocks"

    def weight_and_slot(self, weight: jax.Array | SlottedWeight) -> tuple[jax.Array, jax.Array]:
        return values_and_slot(weight)

    def of_inputs(self, parts: Sequence[jax.Array], backward: bool) -> tuple[list[QuantizedArray], list[Any]]:
        del backward
        form, hadamard = self.operands.activation, self.operands.hadamard
        codes, kept = [], []
        for rows in map(rows_of, parts):
            along_in, along_tokens = _amaxes(rows, form, hadamard)
            codes.append(quantize(rows, form, amax=along_in))
            kept.append(quantize(rows, form, amax=along_tokens, axis="column", hadamard=hadamard))
        return codes, kept

    def for_wgrad(self, saved: QuantizedArray) -> QuantizedArray:
        return saved

    def of_gradients(self, parts: Sequence[jax.Array]) -> list[Gradient]:
        return [self._of_gradient(rows_of(part)) for part in parts]

    def _of_gradient(self, rows: jax.Array) -> Gradient:
        form, hadamard = self.operands.gradient, self.operands.hadamard
        amaxes = _amaxes(rows, form, hadamard)
        return quantize(
            rows,
            form,
            amax=amaxes if form.has_amax else None,
            axis="both",
            hadamard=hadamard,
            key=self.key if self.operands.stochastic else None,
        )

    def forward(self, weight: jax.Array, dtype: np.dtype) -> Callable[[QuantizedArray], jax.Array]:
        rows, scaled = rounded_weight(weight, self.operands, "row", codes=self.scaled), self.scaled

        def multiply(codes: QuantizedArray) -> jax.Array:
            y = _product(codes, rows, 1, dtype, dtype, scaled)
            return save_for_backward(y) if scaled else y  # unlike a `dot_general`, which policies know

        return multiply

    def dgrad(self, weight: jax.Array, dtype: np.dtype) -> Callable[[QuantizedArray], jax.Array]:
        columns, scaled = rounded_weight(weight, self.operands, "column", codes=self.scaled), self.scaled
        return lambda codes: _product(codes, columns, 0, dtype, dtype, scaled)

    def wgrad(self, gradient: QuantizedArray, x: QuantizedArray, dtype: np.dtype, out: np.dtype) -> jax.Array:
        # if transformed, the tokens of both operands were padded with zeros to whole runs
        return _product(gradient, x, 0, dtype, out, self.scaled)


def _amaxes(rows: jax.Array, form: Format, hadamard: bool) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the amaxes of the row-wise and the column-wise copy; `None` for both if the format has no amax."""
    if not form.has_amax:
        return None, None
    whole = multi_amax([rows])[0]
    found = jnp.stack([whole, hadamard_amax(rows) if hadamard else whole])
    kept = operand_amax(found, form)
    return kept[0], kept[1]


def _product(
    a: QuantizedArray,
    b: QuantizedArray | jax.Array,
    b_dim: int,
    dtype: jax.typing.DTypeLike,
    out: jax.typing.DTypeLike,
    scaled: bool,
) -> jax.Array:
    """Returns the product contracted along the blocks of `a` and along dimension `b_dim` of `b`, in the dtype `out`,
    with sums in float32.

    Values are multiplied in `dtype`, which represents them exactly.
    """
    if scaled and isinstance(b, QuantizedArray) and _fits(a):
        return _scaled_product(a, b).astype(out)
    dims = (((0 if a.columns else 1,), (b_dim,)), ((), ()))
    right = values_of(b, dtype) if isinstance(b, QuantizedArray) else b
    return lax.dot_general(values_of(a, dtype), right, dims, preferred_element_type=out)


def _scaled_product(a: QuantizedArray, b: QuantizedArray) -> Float32[jax.Array, "rows columns"]:
    """Returns the float32 product of two matrices, contracted along their blocks: along the columns of a row-wise copy,
    and along the rows of a column-wise one.

    Calls `jax.nn.scaled_matmul`, which runs in cuDNN on SM100, and in operations of XLA elsewhere.
    """
    (left, left_scales), (right, right_scales) = _contraction_last(a), _contraction_last(b)
    y = jax.nn.scaled_matmul(
        left[None], right[None], left_scales[None], right_scales[None], preferred_element_type=jnp.float32
    )[0]
    for q in (a, b):
        if q.amax is not None:
            y = y * tensor_unit(q)
    return y


def _fits(a: QuantizedArray) -> bool:
    """Returns whether `_scaled_product` supports a matrix: it must not be empty, and its contraction must consist of
    whole blocks."""
    assert a.format.block is not None
    return min(a.matrix) > 0 and a.matrix[0 if a.columns else 1] % a.format.block[1] == 0


def _contraction_last(q: QuantizedArray) -> tuple[jax.Array, jax.Array]:
    """Returns the codes and the scales with the contraction last, and with the scales repeated for every row."""
    assert q.scales is not None and q.format.block is not None
    codes, scales = q.codes, q.scales
    rows, columns = reversed(q.matrix) if q.columns else q.matrix
    if q.columns and not q.format.transposed_columns:
        codes, scales = codes.T, scales.T
    values = lax.bitcast_convert_type(codes, _DTYPES[q.format.element])
    scales = jnp.repeat(scales, q.format.block[0], axis=0)[:rows]
    return jnp.reshape(values, (rows, columns)), lax.bitcast_convert_type(scales, _DTYPES[q.format.scale])
