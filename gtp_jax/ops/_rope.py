"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split form that Llama uses, and the
positions of packed documents."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from .._foreign import brief
from .._words import MOST


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A scaling of rotary frequencies, with which a model can use more positions than it was trained on.

    Attributes:
        kind: `"linear"` divides every frequency by `factor` (Chen et al. 2023, arXiv 2306.15595). `"llama3"` divides
            frequencies with fewer than `low_freq_factor` turns in `original_length` positions, keeps those with more
            than `high_freq_factor` turns, and interpolates in between (Llama 3.1). `"yarn"` does the same with
            `beta_slow` and `beta_fast`, interpolates linearly in the index of the frequency, and multiplies queries and
            keys by `attention_factor` (YaRN, Peng et al. 2023, arXiv 2309.00071).
        factor: the factor by which sequences may become longer.
        original_length: the number of positions that the model was trained on before; for `"llama3"` and `"yarn"`.
        low_freq_factor, high_freq_factor: the bounds of the interpolation of `"llama3"`.
        beta_fast, beta_slow: the bounds of the interpolation of `"yarn"`.
        truncate: whether the interpolation of `"yarn"` begins and ends at whole indices of frequencies.
        attention_factor: the factor of queries and keys of `"yarn"`; by default `0.1 * log(factor) + 1`, and 1 for a
            factor of at most 1.

    Raises:
        ValueError: if a value is not allowed.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3", "yarn"):
            raise ValueError(f"`kind` of RopeScaling is {self.kind!r}; it must be 'linear', 'llama3' or 'yarn'.")
        if self.attention_factor is not None and self.kind != "yarn":
            raise ValueError(
                f"`attention_factor` of RopeScaling is {brief(self.attention_factor)}, but `kind` is {self.kind!r}; it "
                "goes with 'yarn'."
            )
        if not isinstance(self.truncate, bool):
            raise ValueError(f"`truncate` of RopeScaling is {self.truncate!r}; it must be True or False.")
        numbers = ["factor", "low_freq_factor", "high_freq_factor", "original_length", "beta_fast", "beta_slow"]
        for name in (*numbers, *(() if self.attention_factor is None else ("attention_factor",))):
            value = getattr(self, name)
            if not 0 < value <= MOST:
                raise ValueError(
                    f"`{name}` of RopeScaling is {brief(value)}; it must be a number above 0, at most {MOST:.7g}."
                )
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(
                    f"`{low}` of RopeScaling is {getattr(self, low)}; it must be below `{high}`, {getattr(self, high)}."
                )

    @property
    def amplitude(self) -> float:
        """Returns the factor by which queries and keys are multiplied."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is None:
            return 0.1 * math.log(max(self.factor, 1)) + 1
        return float(self.attention_factor)

    def scaled(self, frequency: jax.Array, theta: float) -> jax.Array:
        """Returns the scaled frequencies, in radians per position.

        Args:
            frequency: the unscaled frequencies, a geometric series that starts at 1; half as many as rotated
                dimensions.
            theta: the base of the series.
        """
        factor = float(self.factor)  # JAX does not accept an int of more than 32 bits
        if self.kind == "linear":
            return frequency / factor
        if self.kind == "yarn":
            low, high = self._interpolated(len(frequency), theta)
            divided = jnp.clip((jnp.arange(len(frequency), dtype=frequency.dtype) - low) / (high - low), 0, 1)
            return (1 - divided) * frequency + divided * frequency / factor
        turns = float(self.original_length) * frequency / (2 * math.pi)
        kept = (turns - float(self.low_freq_factor)) / float(self.high_freq_factor - self.low_freq_factor)
        kept = jnp.clip(kept, 0, 1)
        return kept * frequency + (1 - kept) * frequency / factor

    def _interpolated(self, count: int, theta: float) -> tuple[float, float]:
        """Returns where YaRN begins and ends to interpolate, as indices of frequencies, which may be fractions."""
        low, high = (
            count * (math.log(self.original_length) - math.log(turns * 2 * math.pi)) / math.log(theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = float(math.floor(low)), float(math.ceil(high))
        low, high = max(low, 0.0), min(high, 2.0 * count - 1)  # an index of dimensions, as in the authors' program
        return low, high + 0.001 if low == high else high


def rope(
    x: jax.Array,
    *,
    theta: float,
    positions: jax.Array | None = None,
    scaling: RopeScaling | None = None,
    rotary_dim: int | None = None,
) -> jax.Array:
    """Rotates each head by the position of its token.

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
        frequency = scaling.scaled(frequency, theta)
    if positions is None:
        positions = jnp.arange(x.shape[1])
    angle = positions.astype(wide)[..., None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if scaling is not None and scaling.amplitude != 1:
        cos, sin = cos * scaling.amplitude, sin * scaling.amplitude
    # The halves are swapped by a flip, which XLA fuses with what follows. A concatenation would be a separate kernel.
    halves = jnp.reshape(x, (*x.shape[:-1], 2, half)).astype(wide)
    signed = jnp.stack([-sin, sin], axis=-2)
    rotated = halves * cos[..., None, None, :] + jnp.flip(halves, -2) * signed[..., None, :, :]
    return jnp.reshape(rotated, x.shape).astype(x.dtype)


def positions_of(segment_ids: jax.Array) -> jax.Array:
    """Returns the position of each token within its own document, counted from 0.

    Args:
        segment_ids: `(..., sequence)` integers of the whole sequence. A document is a run of equal ids.

    Returns:
        int32 positions, of the same shape.
    """
    place = lax.broadcasted_iota(jnp.int32, segment_ids.shape, segment_ids.ndim - 1)
    begins = jnp.concatenate(
        [jnp.ones_like(segment_ids[..., :1], bool), segment_ids[..., 1:] != segment_ids[..., :-1]], axis=-1
    )
    return place - lax.cummax(jnp.where(begins, place, 0), axis=segment_ids.ndim - 1)


def check_rotary(head_dim: int, rotary_dim: int | None, theta: float, scaling: Any) -> None:
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
        raise ValueError(f"`rope_scaling` is {scaling!r}; it must be a `gtp_jax.nn.RopeScaling` or None.")
    if scaling is not None and scaling.kind == "yarn" and not theta > 1:
        raise ValueError(f"`rope_theta` is {theta}; with the scaling 'yarn' it must be above 1.")
