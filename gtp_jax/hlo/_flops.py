"""Floating-point operations of a training step, counted as is usual for a decoder."""

from __future__ import annotations

# A matmul costs 2 operations a parameter and token in the forward pass, and twice that in the backward pass.
_PER_PARAMETER = 6

# Causal attention costs, a layer, head and token, 2 x 2 S head_dim operations for its two matmuls, halved by the
# mask, and twice that in the backward pass.
_PER_SCORE = 6


def step_flops(*, matmul_params: int, tokens: int, layers: int, seq: int, heads: int, head_dim: int) -> int:
    """Operations of one training step of a decoder over `tokens` tokens, recomputation not counted.

        6 * matmul_params * tokens  +  6 * layers * tokens * seq * heads * head_dim

    Args:
        matmul_params: parameters that a token is multiplied with: all but the embedding table (unless the head
            uses it too), the norms and the biases.
        tokens: tokens of the step, over all devices.
        layers: decoder layers.
        seq: tokens of a sequence; its attention is causal and counted at half.
        heads: query heads.
        head_dim: size of a head.

    Raises:
        ValueError: if one of them is not positive.
    """
    given = dict(matmul_params=matmul_params, tokens=tokens, layers=layers, seq=seq, heads=heads, head_dim=head_dim)
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"`{name}` is {value}; it counts something, so it is at least 1.")
    return _PER_PARAMETER * matmul_params * tokens + _PER_SCORE * layers * tokens * seq * heads * head_dim
