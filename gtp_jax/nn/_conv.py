"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from ..weights import GradReduce
from ._array import array_weight, over_batch, refuse_options


class Conv(nnx.Conv):
    """`nnx.Conv` with its kernel sharded over gtp, and gathered for each call.

    It computes what `nnx.Conv` computes, of one example bit for bit, on every mesh: each rank convolves the examples of
    its own, every one whole. Where ranks do not divide the batch, all compute all of it. In a layer of a `Stack` the
    kernel is gathered under the layer before. No recipe quantizes it.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the output's.
        kernel_size: of the window, a number for each spatial dimension.
        strides: of the window.
        grad_reduce: how the kernel's gradient is summed over gtp: `"float32"`, `"bf16-wire"` or `"bf16"`; see
            `reduction_of`. It leaves the convolution in `dtype`.
        rngs: the `params` stream is used.
        options: of `nnx.Conv`: `padding`, `input_dilation`, `kernel_dilation`, `feature_group_count`, `use_bias`,
            `dtype`, `param_dtype`, `precision`, `kernel_init`, `bias_init` and others; but neither `mask` nor
            `kernel_metadata`.

    Raises:
        ValueError: if a size is not positive, `feature_group_count` does not divide the features, or an option is one
            of those two.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        grad_reduce: GradReduce = "float32",
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        refuse_options("Conv", options, "mask", "kernel_metadata")
        window = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
        groups = options.get("feature_group_count", 1)
        if min(in_features, out_features, groups, *window) < 1:
            raise ValueError(
                f"Conv({in_features}, {out_features}, {kernel_size}), feature_group_count {groups}: sizes are whole "
                "numbers of at least 1."
            )
        if in_features % groups or out_features % groups:
            raise ValueError(
                f"`feature_group_count` is {groups}; it must divide the features of input and output, {in_features} "
                f"and {out_features}."
            )
        super().__init__(in_features, out_features, window, strides, rngs=rngs, **options)
        self.kernel = array_weight(self.kernel, self.dtype, grad_reduce)

    def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Maps `(*batch, *spatial, in_features)` to `(*batch, *spatial, out_features)`.

        Raises:
            ValueError: if the input has other features, or too few dimensions.
        """
        dims = len(self.kernel_size) + 1
        if inputs.ndim < dims or inputs.shape[-1] != self.in_features:
            raise ValueError(
                f"Conv takes (*batch, {dims - 1} spatial dimensions, {self.in_features} features); got shape "
                f"{inputs.shape}."
            )
        return over_batch(self, nnx.Conv.__call__, inputs, batched=inputs.ndim > dims)
