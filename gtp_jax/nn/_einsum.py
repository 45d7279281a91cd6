"""Products that a string describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from ..weights import GradReduce
from ._array import array_weight, over_batch, refuse_options


class Einsum(nnx.Einsum):
    """`nnx.Einsum` with its kernel sharded over gtp, and gathered for each call.

    It computes what `nnx.Einsum` computes, of one example bit for bit, on every mesh. Where the string leads input and
    output by the same letter, which the kernel does not have (`"bte,ehd->bthd"`), that is the batch, and each rank
    multiplies the examples of its own; otherwise, or where ranks do not divide the batch, all multiply all of it. In a
    layer of a `Stack` the kernel is gathered under the layer before. No recipe quantizes it.

    Args:
        einsum_str: of two operands, the input and the kernel, such as `"bte,ehd->bthd"`.
        kernel_shape: shape of the kernel.
        bias_shape: shape of the bias, of the kernel's dimensions that the output has; `None` for no bias.
        grad_reduce: how the kernel's gradient is summed over gtp: `"float32"`, `"bf16-wire"` or `"bf16"`; see
            `reduction_of`. It leaves the product in `dtype`.
        rngs: the `params` stream is used.
        options: of `nnx.Einsum`: `dtype`, `param_dtype`, `precision`, `kernel_init`, `bias_init` and others; but not
            `kernel_metadata`.

    Raises:
        ValueError: if the string has not two operands and an output, the kernel another number of dimensions than it
            says, or `kernel_metadata` is given.
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
        """Returns the product of the input and the kernel."""
        return over_batch(self, nnx.Einsum.__call__, inputs, batched=_leads_with_batch(self.einsum_str, inputs.ndim))


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
            f"`einsum_str` is {string!r}, whose kernel {term!r} has {len(term)} dimensions; `kernel_shape` is "
            f"{kernel_shape}."
        )


def _leads_with_batch(string: str, ndim: int) -> bool:
    """Says whether the first dimensions of input and output are one, of which every element is computed alone.

    Args:
        string: without spaces.
        ndim: of the input.
    """
    operands, _, output = string.partition("->")
    term, kernel = operands.split(",")
    if term.startswith("..."):
        return output.startswith("...") and "..." not in kernel and ndim > len(term) - 3
    first = term[:1]
    return bool(first) and output.startswith(first) and first not in kernel and term.count(first) == 1
