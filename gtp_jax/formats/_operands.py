"""The formats of a dense layer's matmul operands."""

from __future__ import annotations

import dataclasses

from ._spec import Format


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """How the operands of a dense layer's three products are quantized: forward, dgrad and wgrad.

    Attributes:
        weight: of forward and dgrad.
        activation: of forward and wgrad.
        gradient: of dgrad and wgrad, the one that comes in.
        hadamard: whether both operands of wgrad are transformed first (see `gtp_jax.hadamard`).
        stochastic: whether the gradient is rounded stochastically, so that it is right on average.
    """

    weight: Format
    activation: Format
    gradient: Format
    hadamard: bool = False
    stochastic: bool = False
