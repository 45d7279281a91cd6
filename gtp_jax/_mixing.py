"""Mixes the bits of words."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def mixed(words: jax.Array) -> jax.Array:
    """Returns a bijective hash of each word, uint32: the finalizer of MurmurHash3 (Appleby, public domain)."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)
