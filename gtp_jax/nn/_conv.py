"""Provides convolutions whose kernels are sharded over gtp."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from flax import nnx

from .._numbers import is_size
from ..weights import GradReduce
from ._array import array_weight, over_batch, refuse_options


class Conv(nnx.Conv):
    """`nnx.Conv` with a kernel that is sharded over gtp and gathered for each call.

    On every mesh, each example is convolved whole, as by `nnx.Conv`. In global view, each rank convolves examples of
    its own; if the batch cannot be divided evenly among the ranks, every rank computes the whole batch. In a `Stack`,
    the chain gathers the kernel with the layer's other weights. No recipe quantizes the kernel.

    Args:
        in_features: the size of the last dimension of the input.
        out_features: the size of the last dimension of the output.
        kernel_size: the size of the window, one number for each spatial dimension. An integer stands for one dimension.
        strides: the strides of the window.
        grad_reduce: how the kernel's gradient is summed over gtp: `"float32"`, `"bf16-wire"` or `"bf16"`; see
            `reduction_of`. The convolution produces the gradient in `dtype`.
        rngs: the random streams; only the stream `params` is used.
        options: options of `nnx.Conv`: `padding`, `input_dilation`, `kernel_dilation`, `feature_group_count`,
            `use_bias`, `dtype`, `param_dtype`, `precision`, `kernel_init`, `bias_init` and others, except `mask` and
            `kernel_metadata`.

    Raises:
        ValueError: if a size is not a whole number of at least 1, `feature_group_count` does not divide the
            features, or `mask` or `kernel_metadata` is given; or if `grad_reduce` is not one of its names.
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
        window = (kernel_size,) if not isinstance(kernel_size, Iterable) else tuple(kernel_size)
        groups = options.get("feature_group_count", 1)
        if not all(map(is_size, (in_features, out_features, groups, *window))):
            raise ValueError(
                f"Conv({in_features}, {out_features}, {kernel_size}), feature_group_count {groups}: sizes must be "
                "whole numbers of at least 1."
            )
        if in_features % groups or out_features % groups:
            raise ValueError(
                f"`feature_group_count` is {groups}; it must divide the numbers of input and output features, "
                f"{in_features} and {out_features}."
            )
        super().__init__(in_features, out_features, window, strides, rngs=rngs, **options)
        self.kernel = array_weight(self.kernel, self.dtype, grad_reduce)

    def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Maps `(*batch, *spatial, in_features)` to `(*batch, *spatial, out_features)`. The spatial sizes of the result
        depend on `padding` and `strides`.

        Raises:
            ValueError: if the input does not have `in_features` features, or has too few dimensions.
        """
        dims = len(self.kernel_size) + 1
        if inputs.ndim < dims or inputs.shape[-1] != self.in_features:
            raise ValueError(
                f"Conv takes (*batch, {dims - 1} spatial dimensions, {self.in_features} features); got shape "
                f"{inputs.shape}."
            )
        return over_batch(self, nnx.Conv.__call__, inputs, batched=inputs.ndim > dims, by_token=inputs.ndim > dims + 1)
