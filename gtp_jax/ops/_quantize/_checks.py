"""Checks the arguments of operations on quantized arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...formats import FORMATS, Format

DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_NAMES = "float32, bfloat16 or float16"


def check_format(format: Any, others: tuple[Format, ...] = ()) -> None:
    """Raises a TypeError unless the argument is one of `FORMATS` or of `others`."""
    if not isinstance(format, Format) or (format.code < 0 and format not in others):
        known = ", ".join(f"gtp_jax.formats.{name}" for name in (*FORMATS, *(one.name for one in others)))
        raise TypeError(f"`format` is {format!r}; it must be one of {known}.")


def check_dtype(name: str, dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Returns the dtype, or raises a TypeError if values may not have it."""
    if jnp.dtype(dtype) not in DTYPES:
        raise TypeError(f"`{name}` is {jnp.dtype(dtype)}; it must be {_NAMES}. Cast first.")
    return jnp.dtype(dtype)


def as_values(name: str, x: Any) -> jax.Array:
    """Returns the array, or raises a TypeError if it is not an array of a float dtype that can be quantized."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"`{name}` is a {type(x).__name__}; it must be an array of {_NAMES}.")
    check_dtype(name, x.dtype)
    return jnp.asarray(x)


def as_matrix(name: str, x: Any) -> jax.Array:
    """Returns the array as `(*lead, M, K)`; an array of one dimension becomes one row."""
    x = as_values(name, x)
    if x.ndim == 0:
        raise ValueError(f"`{name}` is a scalar; its shape must be (*lead, M, K), or (K,) for one row.")
    return x[None, :] if x.ndim == 1 else x


def as_amax(amax: Any, lead: tuple[int, ...]) -> jax.Array:
    """Returns a given amax as a float32 array whose shape is a prefix of `lead`."""
    if hasattr(amax, "dtype") and amax.dtype != jnp.float32 and not getattr(amax, "weak_type", False):
        raise TypeError(f"`amax` is {amax.dtype}; it must be float32, as `gtp_jax.ops.multi_amax` returns it.")
    amax = jnp.asarray(amax, jnp.float32)
    if amax.shape != lead[: amax.ndim]:
        raise ValueError(
            f"`amax` has shape {amax.shape}; it must be () for the whole tensor, or the first of the leading "
            "dimensions "
            f"{lead}."
        )
    return amax
