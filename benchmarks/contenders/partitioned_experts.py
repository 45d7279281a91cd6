"""Computes mixtures of experts for the partitioner contender: gtp_jax's grouped matmul in a `shard_map` over the batch.

XLA compiles `jax.lax.ragged_dot` to dense matmuls, and the partitioner cannot divide a custom kernel. Therefore this
part is written by hand: each rank gathers the experts of a layer just in time and multiplies its own tokens, and the
gradients of experts are reduce-scattered. Even with ep above 1, experts are gathered over all ranks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from workload import Workload

from gtp_jax.ops import (
    ROUTING,
    SAVED,
    Window,
    expand,
    grouped_matmul,
    save_routing,
    shares_of_places,
    sum_of_places,
    weighted_glu,
    with_aux_loss,
)

# How the weights of experts are sharded. Routers, like norms, are not sharded.
SHARDED = {"up": P("gtp", None, None), "down": P("gtp", None, None)}

# The names of values that are kept for backward in addition to the outputs of ordinary matmuls: the outputs of grouped
# matmuls, and the choices of experts.
KEPT = (SAVED, ROUTING)


def shapes(work: Workload) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of a layer's mixture. For experts, gate and up are concatenated in `up`, and
    the contracted dimension is the last one."""
    own = {
        "router": (work.hidden_size, work.num_experts),
        "up": (work.num_experts, 2 * work.intermediate_size, work.hidden_size),
        "down": (work.num_experts, work.hidden_size, work.intermediate_size),
    }
    if work.shared_hidden:
        own["shared_up"] = (work.hidden_size, 2, work.shared_hidden)
        own["shared_down"] = (work.shared_hidden, work.hidden_size)
    return own


def mixture(work: Workload, h: jax.Array, weights: dict[str, Any], gathered: str) -> jax.Array:
    """Returns the weighted sum of each token's experts, `(sequence, token, features)` like `h`.

    Args:
        work: the sizes.
        h: the normalized activations, with sequences sharded over gtp.
        weights: the sharded weights of one layer.
        gathered: the checkpoint name of gathered weights.
    """
    tokens = h.shape[0] * h.shape[1]

    def of_rank(h: jax.Array, router: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        up, down = (checkpoint_name(lax.all_gather(w, "gtp", tiled=True), gathered) for w in (up, down))
        probs, chosen, shares = _route(work, h, router, tokens)
        expert_of = jnp.reshape(chosen, -1)
        order = save_routing(jnp.argsort(expert_of, stable=True).astype(jnp.int32))
        places = jnp.reshape(jnp.argsort(order).astype(jnp.int32), (-1, work.top_k))
        window = Window(order, places, jnp.int32(order.size))
        sizes = jnp.bincount(expert_of, length=work.num_experts).astype(jnp.int32)
        rows = expand(jnp.reshape(h, (-1, h.shape[-1])), window)
        gate, value = jnp.split(grouped_matmul(rows, up[None], sizes), 2, axis=-1)
        of_places = shares_of_places(jnp.reshape(shares, places.shape), window)
        outputs = grouped_matmul(weighted_glu(gate, value, of_places, jax.nn.silu), down[None], sizes)
        return jnp.reshape(sum_of_places(outputs, window), h.shape).astype(h.dtype)

    run = jax.shard_map(of_rank, in_specs=(P("gtp"), P(), P("gtp"), P("gtp")), out_specs=P("gtp"), check_vma=False)
    return run(h, weights["router"], weights["up"], weights["down"])


def _route(work: Workload, h: jax.Array, router: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns probabilities, choices and routing weights. Backward adds the gradient of the load-balancing term, which
    is a mean over `tokens`."""
    wide = jnp.promote_types(h.dtype, jnp.float32)
    logits = jnp.matmul(h.astype(wide), router.astype(wide), precision=lax.Precision.HIGHEST)
    probs = jax.nn.softmax(logits, axis=-1)
    chosen = save_routing(lax.top_k(lax.stop_gradient(probs), work.top_k)[1])
    own = jnp.take_along_axis(probs, chosen, axis=-1)
    load = jnp.sum(jax.nn.one_hot(chosen, work.num_experts, dtype=wide), axis=(1, 2))  # (sequences, experts)
    even = work.top_k * h.shape[1] / work.num_experts
    term = work.aux_loss_coeff / tokens * jnp.sum(load[:, None] / even * probs)
    return probs, chosen, with_aux_loss(own / jnp.sum(own, axis=-1, keepdims=True), term)
