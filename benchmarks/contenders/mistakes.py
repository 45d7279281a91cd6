"""Rounds weights with deliberate mistakes, instead of a recipe. Gradients pass to the master weights unchanged."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import gtp_jax as gtp
from gtp_jax.formats import MXFP8, NVFP4

_SHARDS = 4


def local_amax(kernel: jax.Array) -> jax.Array:
    """Returns weights rounded to NVFP4 without reducing the amax over shards.

    Each shard is quantized with its own amax, but dequantized with that of the first.
    """
    transposed = jnp.swapaxes(kernel, -1, -2)  # blocks run along the input features
    parts = [gtp.ops.quantize(part, NVFP4, amax=_amax(part)) for part in jnp.split(transposed, _SHARDS, axis=-2)]
    read = [gtp.ops.dequantize(dataclasses.replace(part, amax=parts[0].amax), jnp.float32) for part in parts]
    return jnp.swapaxes(jnp.concatenate(read, axis=-2), -1, -2)


def rounded_down(kernel: jax.Array) -> jax.Array:
    """Returns weights rounded to MXFP8 with the scales that OCP suggests. They let the largest elements saturate."""
    rows, columns = MXFP8.run
    assert rows == 1
    *lead, features, out = kernel.shape
    blocks = jnp.reshape(kernel, (*lead, features // columns, columns, out))
    largest = jnp.max(jnp.abs(blocks), axis=-2, keepdims=True)
    scale = jnp.exp2(jnp.floor(jnp.log2(jnp.maximum(largest, 2.0**-100))) - 8)
    codes = jnp.clip(blocks / scale, -MXFP8.element_max, MXFP8.element_max).astype(jnp.float8_e4m3fn)
    return jnp.reshape(codes.astype(jnp.float32) * scale, kernel.shape)


MISTAKES = {"local amax": local_amax, "scales rounded down": rounded_down}


def with_mistake(model: Any, mistake: str) -> Any:
    """Returns a copy of a Llama with wrong weights in its blocks. Gradients pass through unchanged.

    Args:
        model: the model.
        mistake: a key of `MISTAKES`.

    Raises:
        ValueError: if the model has experts.
    """
    model = nnx.clone(model)
    for path, variable in nnx.to_flat_state(nnx.state(model.blocks, nnx.Param)):
        value = variable.get_value()
        if "kernel" in path and value.ndim > 3:
            raise ValueError(
                f"{'.'.join(map(str, path))} is a weight of experts, but mistakes can only be made in a "
                "model without experts. Use another preset."
            )
        if "kernel" in path:
            fixed = lax.stop_gradient(value)
            variable.set_value(value + (MISTAKES[mistake](fixed) - fixed))
    return model


def _amax(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), axis=(-2, -1))
