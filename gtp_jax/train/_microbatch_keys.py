"""Derives the random keys of a microbatch, for stochastic rounding and for the dropout of adapters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ..nn import drops
from ._request import Request
from ._state import TrainState


def keys_of_microbatch(
    request: Request, state: TrainState, microbatch: jax.Array | int, *, of_rank: bool = False
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the key with which a microbatch rounds the gradients that matmuls take as operands, and the key of its
    dropout in adapters, as words of uint32, `(2,)`. `None` instead of a key from which nothing would be drawn.

    Keys depend only on the seed, the number of updates made, the microbatch, the program and, with `of_rank`, the rank.
    A run can therefore be repeated exactly, and a resumed run uses the same keys as one that was never interrupted. All
    ranks of a mesh get the same key of dropout; programs on separate meshes get different keys.

    Args:
        request: the request, with the recipe of the call.
        state: the state.
        microbatch: the number of the microbatch.
        of_rank: whether to fold the rank into the key of stochastic rounding, inside a `shard_map`. Local view needs
            this, because each rank rounds other numbers. In global view, modules fold in the rank themselves.
    """
    recipe = request.recipe
    rounds = recipe is not None and any(k.operands is not None and k.operands.stochastic for k in recipe.kinds)
    drop = drops(state.model_def.variables)
    return (
        _key(request, state.step, microbatch, of_rank=of_rank) if rounds else None,
        _key(request, state.step, microbatch, of_rank=False) if drop else None,
    )


def _key(request: Request, step: jax.Array, microbatch: jax.Array | int, *, of_rank: bool) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(request.seed, impl="threefry2x32"), step)
    key = jax.random.fold_in(key, microbatch)
    if request.program:
        key = jax.random.fold_in(key, (1 << 31) + request.program)  # no microbatch has such a number
    mesh = jax.sharding.get_abstract_mesh()
    if of_rank:
        rank = jnp.uint32(0) if mesh.empty else lax.axis_index(mesh.axis_names).astype(jnp.uint32)
        key = jax.random.fold_in(key, rank)
    return jax.random.key_data(key)
