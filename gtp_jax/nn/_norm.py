"""Provides the norms of layers: their parameters, how they are applied, and a norm that is a layer by itself."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from ..ops import layer_norm, rms_norm
from ._layer import Layer
from ._weight import make_vector

Norm = Literal["rms", "zero_centered_rms", "layer"] | None


def check_norm(norm: Any) -> Norm:
    """Returns its argument, which must be the name of a norm or `None`.

    Raises:
        ValueError: if it is anything else.
    """
    if norm not in ("rms", "zero_centered_rms", "layer", None):
        raise ValueError(f"`norm` is {norm!r}; it must be 'rms', 'zero_centered_rms', 'layer' or None.")
    return norm


def make_norm(norm: Any, size: int, rngs: nnx.Rngs, dtype: jax.typing.DTypeLike) -> tuple[Any, Any]:
    """Returns the scale and the shift of a new norm that changes nothing but the size of its input; `nnx.data(None)`
    for each that the norm does not have.

    Raises:
        ValueError: if there is no such norm.
    """
    start = initializers.zeros if check_norm(norm) == "zero_centered_rms" else initializers.ones
    scale: Any = make_vector(size, start, rngs.params(), dtype) if norm else nnx.data(None)
    shift: Any = make_vector(size, initializers.zeros, rngs.params(), dtype) if norm == "layer" else nnx.data(None)
    return scale, shift


def normalized(norm: Norm, x: jax.Array, scale: Any, shift: Any, epsilon: float) -> jax.Array:
    """Applies a norm, given its parameters as `make_norm` returns them."""
    if norm is None:
        return x
    if norm == "layer":
        return layer_norm(x, scale.get_value(), shift.get_value(), epsilon=epsilon)
    return rms_norm(x, scale.get_value(), epsilon=epsilon, zero_centered=norm == "zero_centered_rms")


class NormLayer(Layer):
    """A norm by itself, for example of what a branch adds to the residual stream (sandwich norms, as in Gemma). A norm
    that precedes a dense layer belongs to that layer; see `LayerNormDense`.

    Args:
        features: the size of the last dimension.
        norm: the norm, as in `LayerNormDense`.
        epsilon: the epsilon of the norm.
        sequence_parallel: whether the input is sharded over tp along the sequence.
        param_dtype: the dtype of the parameters.
        rngs: the random streams; only the stream `params` is used.

    Raises:
        ValueError: if there is no such norm.
    """

    context_parallel = True

    def __init__(
        self,
        features: int,
        *,
        norm: Norm = "rms",
        epsilon: float = 1e-6,
        sequence_parallel: bool = True,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__()
        self.scale, self.shift = make_norm(norm, features, rngs, param_dtype)
        self.norm: Norm = norm
        self.epsilon = epsilon
        self.sequence_parallel = sequence_parallel

    def local(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, ..., features)` to the same shape."""
        return normalized(self.norm, x, self.scale, self.shift, self.epsilon)
