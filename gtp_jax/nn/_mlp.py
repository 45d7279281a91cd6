"""Provides the feed-forward layer of a transformer block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import jax
import numpy as np
from flax import nnx

from ..ops import save_activation, swiglu_fp8
from ..weights import fused_parts
from ._dense import Dense, LayerNormDense
from ._layer import Layer
from ._norm import Norm
from ._options import DenseOptions
from ._weight import apply_gathered


class MLP(Layer):
    """Computes `down(activation(gate(norm(x))) * up(norm(x)))`: SwiGLU by default (Shazeer 2020, arXiv 2002.05202).

    Args:
        features: the size of the input and of the output.
        hidden: the size of the hidden layer, whose features tp shards.
        gated: whether there is a gate. Without one, the layer computes `down(activation(up(norm(x))))`.
        activation: the elementwise function that is applied to the gate; if there is no gate, to `up(norm(x))`.
        norm: the norm of the input, as in `LayerNormDense`.
        epsilon: the epsilon of the norm.
        sequence_parallel: whether to shard activations along the sequence, as in `Dense`.
        rngs: the random streams; only the stream `params` is used.
        options: further arguments for the layers `up` and `down`; see `Dense`.

    Raises:
        ValueError: if `norm` is not one of its names, or `Dense` refuses an argument.
    """

    fewest_dims = 2
    context_parallel = True

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        gated: bool = True,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
        norm: Norm = "rms",
        epsilon: float = 1e-6,
        sequence_parallel: bool = True,
        rngs: nnx.Rngs,
        **options: Unpack[DenseOptions],
    ) -> None:
        super().__init__()
        sizes = {"gate": hidden, "up": hidden} if gated else {"up": hidden}
        shared: dict[str, Any] = {"sequence_parallel": sequence_parallel, "rngs": rngs, **options}
        self.up = LayerNormDense(features, sizes, norm=norm, epsilon=epsilon, padding_value=0.0, **shared)
        self.down = Dense(hidden, features, parallel="row", **shared)
        self.activation = activation
        self.gated = gated
        self.sequence_parallel = sequence_parallel

    def local(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, ..., features)` to the same shape."""
        if self._as_one:
            return self._in_fp8(x)
        return self.down.from_parts(tuple(save_activation(self._activated(part)) for part in self.up.to_parts(x)))

    @property
    def _as_one(self) -> bool:
        """Whether both matmuls, with SwiGLU between them, run as one operation in FP8."""
        up, down = self.up, self.down
        ours = type(up) is LayerNormDense and type(down) is Dense and type(self)._activated is MLP._activated
        swiglu = ours and self.activation is jax.nn.silu and up.names == ("gate", "up")
        return (
            swiglu
            and up.dtype == down.dtype != np.float64
            and up.plain_fp8
            and down.plain_fp8
            and up.operands == down.operands
        )

    def _in_fp8(self, x: jax.Array) -> jax.Array:
        operands, parts = self.up.operands, fused_parts(self.up.layouts)
        assert operands is not None

        def multiply(up: Any, down: Any, x: jax.Array) -> jax.Array:
            return swiglu_fp8(x, up, down, operands.gradient, parts=parts, keep_codes=operands.keep_codes)

        return apply_gathered((self.up, self.down), multiply, self.up.left_operand(x), remat="matmuls")

    def _activated(self, hidden: dict[str, jax.Array]) -> jax.Array:
        if self.gated:
            return self.activation(hidden["gate"]) * hidden["up"]
        return self.activation(hidden["up"])
