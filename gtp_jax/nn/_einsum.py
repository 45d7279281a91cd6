"""Provides an einsum layer whose kernel is sharded over gtp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from ..weights import GradReduce
from ._array import array_weight, over_batch, refuse_options


class Einsum(nnx.Einsum):
    """`nnx.Einsum` with a kernel that is sharded over gtp and gathered for each call.

    On every mesh, each example is computed whole, as by `nnx.Einsum`. In global view, each rank multiplies its own
    examples if input and output begin with the same letter, which is then the batch, such as `b` in
    `"bte,ehd->bthd"`. The letter must occur once in the input, and not in the kernel. Input and output may also both
    begin with `...`, if the kernel does not contain it. Otherwise, or if the batch cannot be divided evenly among the
    ranks, every rank computes the whole result. In a `Stack`, the chain gathers the kernel with the layer's other
    weights. No recipe quantizes the kernel.

    Args:
        einsum_str: the einsum string of two operands, the input and the kernel, such as `"bte,ehd->bthd"`.
        kernel_shape: the shape of the kernel.
        bias_shape: the shape of the bias, which has the dimensions that occur in both the kernel and the output; `None`
            for no bias.
        grad_reduce: how the kernel's gradient is summed over gtp: `"float32"`, `"bf16-wire"` or `"bf16"`; see
            `reduction_of`. The product produces the gradient in `dtype`.
        rngs: the random streams; only the stream `params` is used.
        options: options of `nnx.Einsum`: `dtype`, `param_dtype`, `precision`, `kernel_init`, `bias_init` and others,
            except `kernel_metadata`.

    Raises:
        ValueError: if the string does not have two operands and an output, if the string and `kernel_shape` give the
            kernel different numbers of dimensions, if `grad_reduce` is not one of its names, or if `kernel_metadata` is
            given.
    """

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        *,
        grad_reduce: GradReduce = "float32",
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        refuse_options("Einsum", options, "kernel_metadata")
        shape = tuple(kernel_shape)
        _check_string(einsum_str, shape)
        bias = None if bias_shape is None else tuple(bias_shape)
        super().__init__(einsum_str, shape, bias, rngs=rngs, **options)
        self.kernel = array_weight(self.kernel, self.dtype, grad_reduce)

    def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the einsum of the input and the kernel, plus the bias if there is one."""
        batched, by_token = (_keeps(self.einsum_str, inputs.ndim, dim) for dim in (0, 1))
        return over_batch(self, nnx.Einsum.__call__, inputs, batched=batched, by_token=by_token)


def _check_string(string: str, kernel_shape: tuple[int, ...]) -> None:
    operands, arrow, _ = string.replace(" ", "").partition("->")
    if not arrow or operands.count(",") != 1:
        raise ValueError(
            f"`einsum_str` is {string!r}; it must have two operands, the input and the kernel, and an output, such as "
            "'bte,ehd->bthd'."
        )
    term = operands.split(",")[1]
    if "." not in term and len(term) != len(kernel_shape):
        raise ValueError(
            f"`einsum_str` is {string!r}, whose kernel {term!r} has {len(term)} dimensions, but `kernel_shape` is "
            f"{kernel_shape}. Make the numbers of dimensions equal."
        )


def _keeps(string: str, ndim: int, dim: int) -> bool:
    """Returns whether a dimension of the input is also that dimension of the output, and the elements along it are
    computed alike and independently of each other.

    Args:
        string: the einsum string, without spaces.
        ndim: the number of dimensions of the input.
        dim: the dimension, not negative.
    """
    operands, _, output = string.partition("->")
    term, kernel = operands.split(",")
    unnamed = "".join(map(str, range(ndim - len(term) + 3)))
    term, kernel, output = (letters.replace("...", unnamed) for letters in (term, kernel, output))
    letter = term[dim : dim + 1]
    return bool(letter) and output[dim : dim + 1] == letter and letter not in kernel and term.count(letter) == 1
