"""Models that generate, and what they are compared with: the whole sequence computed again for every token."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig

DENSE = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    intermediate_size=48,
    qk_norm=True,
    dtype="float64",
)


class Windowed(nnx.Module):
    """A model of a user's own: layers in a list and in a stack, windows of different length, sinks, a soft cap, learned
    positions; it computes all logits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        shared: dict[str, Any] = dict(dtype=jnp.float64, param_dtype=jnp.float64, rngs=rngs)
        self.embed = gtp.Embed(97, 24, **shared)
        self.places = gtp.Param(nnx.initializers.normal(0.5)(rngs.params(), (64, 24), jnp.float64))
        heads: dict[str, Any] = dict(num_heads=4, num_kv_heads=2, **shared)
        self.first = nnx.List([gtp.Attention(24, window=3, sinks=True, rope_theta=None, **heads)])
        block = lambda rngs: gtp.Attention(24, window=6, soft_cap=2.0, rotary_dim=4, **{**heads, "rngs": rngs})  # noqa: E731
        self.stacks = nnx.List([gtp.Stack(block, 2, rngs=rngs)])
        self.norm = nnx.LayerNorm(24, param_dtype=jnp.float64, rngs=rngs)
        self.head = gtp.Dense(24, 97, parallel="column", **shared)

    def __call__(self, tokens: jax.Array, *, positions: jax.Array | None = None) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
        x = self.embed(tokens) + self.places.gather()[positions]
        for layer in self.first:
            x = x + layer(x, positions=positions)
        for stack in self.stacks:
            x = stack(x, positions=positions)
        return self.head(self.norm(x))


def model_of(make: Any) -> Any:
    """Returns a model, the same on every mesh, whose sinks and norms are random too."""
    factory = (lambda rngs: Llama(make, rngs=rngs)) if isinstance(make, LlamaConfig) else make
    model = gtp.init(factory, nnx.Rngs(3))
    for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] in ("sinks", "scale", "query_scale", "key_scale"):
            drawn = np.random.default_rng(len(path)).normal(1, 0.3, v.get_value().shape)
            v.set_value(jax.device_put(drawn.astype(v.get_value().dtype), v.get_value().sharding))
    return model


def scope_of(degrees: dict[str, int] | None) -> Any:
    """Returns the context of a mesh of these degrees, or of none."""
    if degrees is None:
        return contextlib.nullcontext()
    return jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())]))


@nnx.jit
def _forward(model: Any, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def greedy(model: Any, prompt: list[int], count: int, length: int = 32) -> list[int]:
    """Returns the likeliest tokens, one after another, from the whole sequence each time. Called without a mesh."""
    row = list(prompt)
    for _ in range(count):
        logits = _forward(model, jnp.asarray([[*row, *[0] * (length - len(row))]]))
        row.append(int(jnp.argmax(logits[0, len(row) - 1])))
    return row[len(prompt) :]
