"""Declares the arguments that `Attention`, `CrossAttention`, `MLP` and `LayerNormDense` pass on to `Dense`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

import jax

from ..weights import GradReduce
from ._weight import Initializer


class DenseOptions(TypedDict, total=False):
    """The arguments of `Dense` that `Attention`, `CrossAttention` and `MLP` pass on; `Dense` describes them."""

    use_bias: bool
    dtype: jax.typing.DTypeLike
    param_dtype: jax.typing.DTypeLike
    grad_reduce: GradReduce
    kernel_init: Initializer


class LayerNormDenseOptions(TypedDict, total=False):
    """The arguments of `Dense` that `LayerNormDense` passes on; `Dense` describes them."""

    use_bias: bool
    units: int | Mapping[str, int]
    padding_value: float
    sequence_parallel: bool
    dtype: jax.typing.DTypeLike
    grad_reduce: GradReduce
    kernel_init: Initializer
