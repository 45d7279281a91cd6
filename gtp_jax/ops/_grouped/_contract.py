"""Defines what an implementation of grouped matmuls is, and what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...formats import Format, QuantizedArray
from ...mesh import platform
from .._operand import values_of


class Problem(NamedTuple):
    """A grouped matmul for which an implementation is chosen.

    Attributes:
        shape: the shape of the weight, `(shards, groups, part, in)`.
        rows: the number of rows.
        dtype: the dtype of the values, and of the results of forward and dgrad.
        codes: the format of the weight's codes; `None` if it comes as values.
    """

    shape: tuple[int, ...]
    rows: int
    dtype: np.dtype
    codes: Format | None = None


class GroupedMatmul(NamedTuple):
    """An implementation of grouped matmuls, a row of `TABLE`.

    Every weight is `(shards, groups, part, in)`, as a gather leaves it, and `group_sizes` are int32 `(groups,)`. Sizes
    beyond the rows are cut off. Operands are values, or codes if `codes` is a format.

    `product(x, weight, group_sizes, *, dtype, transposed)` multiplies each row by its group's kernel, or by the
    kernel's transpose if `transposed`, as in forward. `x` is `(rows, in)` if `transposed`, otherwise `(rows, shards *
    part)`; codes are row-wise. Rows after the last group become zeros. The result has the given dtype, which is that of
    values.

    `outer(y, x, group_sizes, *, dtype, shards)` returns for each group the sum over its rows of `y[row] x[row]^T`, as
    in wgrad: `(shards, groups, part, in)` in the given dtype. `y` is `(rows, shards * part)`, and `x` is `(rows, in)`;
    codes are column-wise, and each of their groups begins at a multiple of 128 rows, and is padded to one.

    Attributes:
        native: whether these are kernels, rather than the reference.
        codes: the format of the weight's codes that are multiplied; `None` if values are.
        lacks: returns why a problem is not computed in this way on the current platform; an empty string if it is.
        product: computes forward and dgrad.
        outer: computes wgrad.
    """

    native: bool
    codes: Format | None
    lacks: Callable[[Problem], str]
    product: Callable[..., jax.Array]
    outer: Callable[..., jax.Array]

    def operand(self, q: QuantizedArray, dtype: jax.typing.DTypeLike) -> jax.Array | QuantizedArray:
        """Returns codes as this implementation multiplies them: as they are, or their values."""
        return q if self.codes else values_of(q, dtype)


def lacks_kernels(problem: Problem) -> str:
    """Returns why no kernel computes a problem; an empty string if those in Pallas do, which take any sizes."""
    if platform() == "gpu" and problem.dtype in (jnp.bfloat16, jnp.float16):
        return ""
    return f"the kernels support bfloat16 and float16 on GPUs, and this is {problem.dtype}"
