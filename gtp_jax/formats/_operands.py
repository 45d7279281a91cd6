"""The formats of a dense layer's matmul operands."""

from __future__ import annotations

import dataclasses

from ._spec import Format


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedScaling:
    """How the scales of a step follow from the amaxes of the steps before it.

    Attributes:
        history: the number of steps whose amaxes are kept.
        algorithm: `"max"` for the largest amax of the history, or `"most_recent"` for that of the last step.
        margin: scales leave room for amaxes that are `2**margin` times as large.
    """

    history: int
    algorithm: str
    margin: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """How the operands of a dense layer's three matmuls (forward, dgrad and wgrad) are quantized.

    Attributes:
        weight: the format of the weight, an operand of forward and dgrad.
        activation: the format of the activation, an operand of forward and wgrad.
        gradient: the format of the incoming gradient, an operand of dgrad and wgrad.
        hadamard: whether both operands of wgrad are transformed first (see `gtp_jax.ops.hadamard`).
        stochastic: whether the gradient is rounded stochastically, so that rounding is unbiased.
        delayed: how scales follow from the amaxes of earlier steps; `None` if each operand is scaled by its own.
        attention: whether attention behind these dense layers multiplies in `activation` too, in forward.
        keep_codes: whether dense layers keep the codes of their inputs for wgrad, instead of the inputs; `None` if the
            remat policy in force saves them.
    """

    weight: Format
    activation: Format
    gradient: Format
    hadamard: bool = False
    stochastic: bool = False
    delayed: DelayedScaling | None = None
    attention: bool = False
    keep_codes: bool | None = None

    @property
    def rounds_input_once(self) -> bool:
        """Whether the input's codes, which can also be sent, suffice to make the operands of both forward and wgrad.

        Wgrad multiplies FP8 codes unchanged. Values of MXFP8 and of FP8 in blocks are rounded again for wgrad, in
        blocks along the rows. Like those of the first rounding, the scales of these blocks are powers of two, so values
        that do not underflow lose nothing. 4-bit values would lose precision in a second rounding, and wgrad's operand
        must be transformed before it is rounded.
        """
        return self.activation.block is None or not self.activation.has_amax

    def blocks_divide(self, tokens: int) -> bool:
        """Returns whether a sequence has the same codes if each part of `tokens` tokens is rounded by itself: if every
        block of tokens is in one part, and no amax or random number depends on other parts."""
        block = self.activation.block
        return block is not None and not (self.activation.has_amax or self.stochastic or tokens % block[1])
