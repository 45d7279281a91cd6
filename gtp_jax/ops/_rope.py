"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split form that Llama uses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._foreign import brief
from ._checks import MOST


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A scaling of rotary frequencies, with which a model can use more positions than it was trained on.

    Attributes:
        kind: `"linear"` divides every frequency by `factor` (Chen et al. 2023, arXiv 2306.15595). `"llama3"` divides
            frequencies with fewer than `low_freq_factor` turns in `original_length` positions, keeps those with more
            than `high_freq_factor` turns, and interpolates in between (Llama 3.1).
        factor: the factor by which sequences may become longer.
        low_freq_factor, high_freq_factor, original_length: the parameters of `"llama3"`; not used by `"linear"`.

    Raises:
        ValueError: if a value is not allowed.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"`kind` of RopeScaling is {self.kind!r}; it must be 'linear' or 'llama3'.")
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_length"):
            value = getattr(self, name)
            if not 0 < value <= MOST:
                raise ValueError(
                    f"`{name}` of RopeScaling is {brief(value)}; it must be a number above 0, at most {MOST:.7g}."
                )
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"`low_freq_factor` of RopeScaling is {self.low_freq_factor}; it must be below `high_freq_factor`, "
                f"{self.high_freq_factor}."
            )

    def scaled(self, frequency: jax.Array) -> jax.Array:
        """Returns the scaled frequencies, in radians per position."""
        factor = float(self.factor)  # JAX does not accept an int of more than 32 bits
        if self.kind == "linear":
            return frequency / factor
        turns = float(self.original_length) * frequency / (2 * math.pi)
        kept = (turns - float(self.low_freq_factor)) / float(self.high_freq_factor - self.low_freq_factor)
        kept = jnp.clip(kept, 0, 1)
        return kept * frequency + (1 - kept) * frequency / factor


def rope(
    x: jax.Array,
    *,
    theta: float,
    positions: jax.Array | None = None,
    scaling: RopeScaling | None = None,
    rotary_dim: int | None = None,
) -> jax.Array:
    """Rotates each head by its position.

    Args:
        x: `(batch, sequence, heads, head_dim)`.
        theta: the base of the geometric series of wavelengths.
        positions: `(sequence,)` or `(batch, sequence)`; by default 0, 1, ..., for a whole sequence.
        scaling: the scaling of the frequencies; none by default.
        rotary_dim: the number of leading dimensions of a head that are rotated, an even number; all by default.
    """
    dims = x.shape[-1] if rotary_dim is None else rotary_dim
    if dims < x.shape[-1]:
        rotated = rope(x[..., :dims], theta=theta, positions=positions, scaling=scaling)
        return jnp.concatenate([rotated, x[..., dims:]], axis=-1)
    half = dims // 2
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequency = theta ** (-jnp.arange(half, dtype=wide) / half)
    if scaling is not None:
        frequency = scaling.scaled(frequency)
    if positions is None:
        positions = jnp.arange(x.shape[1])
    angle = positions.astype(wide)[..., None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    # The halves are swapped by a flip, which XLA fuses with what follows. A concatenation would be a separate kernel.
    halves = jnp.reshape(x, (*x.shape[:-1], 2, half)).astype(wide)
    signed = jnp.stack([-sin, sin], axis=-2)
    rotated = halves * cos[..., None, None, :] + jnp.flip(halves, -2) * signed[..., None, :, :]
    return jnp.reshape(rotated, x.shape).astype(x.dtype)


def check_rotary(head_dim: int, rotary_dim: int | None, scaling: Any) -> None:
    """Checks that heads can be rotated.

    Raises:
        ValueError: if they cannot; the message names the argument and what is allowed.
    """
    dims = head_dim if rotary_dim is None else rotary_dim
    if rotary_dim is not None and not 0 < rotary_dim <= head_dim:
        raise ValueError(f"`rotary_dim` is {rotary_dim}; it must be at least 2 and at most `head_dim`, {head_dim}.")
    if dims < 2 or dims % 2:
        name = "head_dim" if rotary_dim is None else "rotary_dim"
        raise ValueError(f"`{name}` is {dims}; rotary embedding needs an even number of at least 2.")
    if scaling is not None and not isinstance(scaling, RopeScaling):
        raise ValueError(f"`rope_scaling` is {scaling!r}; it must be a `gtp_jax.RopeScaling` or None.")
