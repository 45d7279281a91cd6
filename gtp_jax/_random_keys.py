"""Converts random keys to stored words and back. All functions take arrays, tracers and `jax.ShapeDtypeStruct`s."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def is_key(value: Any) -> bool:
    """Returns whether a value is an array of typed keys, as `jax.random.key` makes them."""
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def key_impl(key: Any) -> Any:
    """Returns the PRNG implementation of a key, as `jax.random.wrap_key_data` takes it."""
    found: list[Any] = []  # `jax.random.key_impl` accepts arrays and tracers, but not shapes
    jax.eval_shape(lambda traced: found.append(jax.random.key_impl(traced)), jax.ShapeDtypeStruct((), key.dtype))
    return found[0]


def key_words(key: Any) -> Any:
    """Returns the words of a key."""
    if not isinstance(key, jax.ShapeDtypeStruct):
        return jax.random.key_data(key)
    words = jax.eval_shape(jax.random.key_data, key)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=key.sharding)


def as_key(words: Any, impl: Any) -> Any:
    """Returns the key with these words and this PRNG implementation."""
    if not isinstance(words, jax.ShapeDtypeStruct):
        return jax.random.wrap_key_data(words, impl=impl)
    key = jax.eval_shape(lambda words: jax.random.wrap_key_data(words, impl=impl), words)
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=words.sharding)
