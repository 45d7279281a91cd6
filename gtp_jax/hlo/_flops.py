"""Counts the floating-point operations of a training step, as is usual for a decoder."""

from __future__ import annotations

# A matmul costs 2 operations per parameter and token in the forward pass, and twice that in the backward pass.
_PER_PARAMETER = 6

# Causal attention costs 2 x 2 S head_dim operations per layer, head and token for its two matmuls, halved by the mask,
# and twice that in the backward pass.
_PER_SCORE = 6


def step_flops(*, matmul_params: int, tokens: int, layers: int, seq: int, heads: int, head_dim: int) -> int:
    """Returns the number of operations of one training step of a decoder, without recomputation:

        6 * matmul_params * tokens  +  6 * layers * tokens * seq * heads * head_dim

    Args:
        matmul_params: the number of parameters by which a token is multiplied: all except the embedding table (unless
            the head also uses it), the norms and the biases.
        tokens: the number of tokens of the step, over all devices.
        layers: the number of decoder layers.
        seq: the number of tokens per sequence. Attention is causal, so it counts half.
        heads: the number of query heads.
        head_dim: the size of a head.

    Raises:
        ValueError: if an argument is not positive.
    """
    given = dict(matmul_params=matmul_params, tokens=tokens, layers=layers, seq=seq, heads=heads, head_dim=head_dim)
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"`{name}` is {value}; it is a count, so it must be at least 1.")
    return _PER_PARAMETER * matmul_params * tokens + _PER_SCORE * layers * tokens * seq * heads * head_dim
