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

    @property
    def rounds_input_once(self) -> bool:
        """Says whether a row may be rounded once: forward's and wgrad's operands are both made of its codes, which may
        travel.

        FP8 is multiplied in wgrad as it is. MXFP8's values are rounded again, in blocks along the rows, whose scales
        are powers of two as well: nothing is lost of a value that does not underflow. Values of four bits would be
        rounded twice, and wgrad's operand is transformed before it is rounded.
        """
        return self.activation.block is None or not self.activation.has_amax
