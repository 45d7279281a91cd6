"""Models on a mesh whose arrays are drawn once for all meshes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

import gtp_jax as gtp


def placed(factory: Callable[[nnx.Rngs], Any], seed: int = 0) -> Any:
    """Returns what `gtp.init` returns, but for rounding of the draws, each of which it compiles anew for every mesh.

    Args:
        factory: of the model. What it draws is kept, for the next call with the same function.
        seed: of `nnx.Rngs`.
    """
    model = gtp.nn.abstract_model(factory)  # first, as it refuses what the mesh in scope has no place for
    arrays = _arrays(factory, seed, jax.config.jax_enable_x64)
    variables = nnx.to_flat_state(nnx.state(model))
    if any(v.get_raw_value().shape != arrays[path].shape for path, v in variables):
        return gtp.init(factory, nnx.Rngs(seed))  # because shards are padded
    for path, v in variables:
        v.set_raw_value(jax.device_put(arrays[path], v.get_raw_value().sharding))
    return model


@functools.lru_cache(32)
def _arrays(factory: Callable[[nnx.Rngs], Any], seed: int, wide: bool) -> dict[Any, np.ndarray]:
    with jax.set_mesh(gtp.make_mesh(devices=jax.devices()[:1])), gtp.use_recipe(None):
        state = jax.jit(lambda: nnx.state(factory(nnx.Rngs(seed))))()
    return {path: np.array(v.get_raw_value()) for path, v in nnx.to_flat_state(state)}
