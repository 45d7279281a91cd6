"""Models that generate, and the reference for them: the whole sequence recomputed for every token."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig

DENSE = LlamaConfig(
    vocab_size=97, hidden_size=32, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=6, intermediate_size=48,
    qk_norm=True, dtype="float64",
)  # fmt: skip


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
    values = _values(make)
    model = gtp.nn.abstract_model(_factory(make))
    variables = nnx.to_flat_state(nnx.state(model))
    if any(v.get_value().shape != values[path].shape for path, v in variables):
        return _drawn(make)  # because its shards are padded
    for path, v in variables:
        v.set_value(jax.device_put(values[path], v.get_value().sharding))
    return model


@functools.cache
def _values(make: Any) -> dict[Any, np.ndarray]:
    """Returns what the variables of a model hold, drawn once for all meshes."""
    with jax.set_mesh(gtp.make_mesh(devices=jax.devices()[:1])):
        return {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(nnx.state(_drawn(make)))}


def _drawn(make: Any) -> Any:
    model = gtp.init(_factory(make), nnx.Rngs(3))
    for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] in ("sinks", "scale", "query_scale", "key_scale") or "bias" in path:
            drawn = np.random.default_rng(len(path)).normal(1, 0.3, v.get_value().shape)
            v.set_value(jax.device_put(drawn.astype(v.get_value().dtype), v.get_value().sharding))
    return model


def _factory(make: Any) -> Any:
    return (lambda rngs: Llama(make, rngs=rngs)) if isinstance(make, LlamaConfig) else make


def scope_of(degrees: dict[str, int] | None) -> Any:
    """Returns the context of a mesh of these degrees, or of none."""
    if degrees is None:
        return contextlib.nullcontext()
    return jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())]))


@nnx.jit
def _forward(model: Any, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def forward(model: Any, rows: list[list[int]]) -> np.ndarray:
    """Returns the logits of up to 8 rows of up to 32 tokens, for which there is one program. Called without a mesh."""
    tokens = np.zeros((8, 32), int)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return np.asarray(_forward(model, tokens))


def greedy(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Returns the likeliest tokens of each row, one after another, from the whole sequences each time."""
    rows = [list(prompt) for prompt in prompts]
    for _ in range(count):
        logits = forward(model, rows)
        for i, row in enumerate(rows):
            row.append(int(np.argmax(logits[i, len(row) - 1])))
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
