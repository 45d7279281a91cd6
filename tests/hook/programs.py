"""Programs of a GPT-2 of stock layers, compiled for eight H200s. No GPU is needed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.hook import largest_unit
from gtp_jax.recipes import Recipe
from gtp_jax.train import compile_options

WIDTH, HIDDEN, VOCAB, LENGTH, BATCH, LAYERS = 2048, 8192, 32768, 1024, 32, 4
BF16: dict[str, Any] = dict(dtype=jnp.bfloat16)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.LayerNorm(WIDTH, rngs=rngs, **BF16)
        self.attention = nnx.MultiHeadAttention(16, WIDTH, decode=False, rngs=rngs, **BF16)
        self.second = nnx.LayerNorm(WIDTH, rngs=rngs, **BF16)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs, **BF16)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs, **BF16)

    def __call__(self, x, mask):
        x = x + self.attention(self.first(x), mask=mask)
        return x + self.down(jax.nn.gelu(self.up(self.second(x))))


class GPT2(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs, **BF16)
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs, **BF16)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs, **BF16)

    def __call__(self, tokens):
        x, mask = self.embed(tokens), nnx.make_causal_mask(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def loss_of(model: Any, tokens: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()


@functools.cache
def compiled(
    hook: bool = True,
    degrees: tuple[tuple[str, int], ...] = (("gtp", 8),),
    recipe: Recipe | None = None,
    **options: Any,
) -> tuple[str, int]:
    """Returns the program of loss and gradients, and its temporary bytes on one device.

    Args:
        hook: whether blocks are hooked; otherwise the same shards are left to the partitioner.
        degrees: of the mesh.
        recipe: in scope.
        options: of `gtp_jax.shard`.
    """
    devices = hlo.topology_devices(hlo.parse_target("h200:8"))
    mesh = gtp.make_mesh(**dict(degrees), devices=devices)
    with jax.set_mesh(mesh):
        model = gtp.shard(nnx.eval_shape(lambda: GPT2(nnx.Rngs(0))), "layers.*", **options)
        graph, state = nnx.split(model)
        axes = tuple(axis for axis in ("dp", "gtp") if axis in mesh.shape)
        tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32, sharding=NamedSharding(mesh, P(axes)))

        def step(state: Any, tokens: jax.Array) -> Any:
            return jax.value_and_grad(lambda state: loss_of(nnx.merge(graph, state), tokens))(state)

        with gtp.use_recipe(recipe), gtp.hook.without_hook() if not hook else jax.named_scope("hook"):
            lowered = jax.jit(step, out_shardings=(None, jax.tree.map(lambda a: a.sharding, state))).lower(
                state, tokens
            )
        chosen = compile_options(
            "gpu",
            largest_unit=largest_unit(model) if hook else 0,
            tp=dict(degrees).get("tp", 1),
            fp8=recipe is not None and recipe.operands is not None,
        )
        built = lowered.compile({**hlo.COMPILE_OPTIONS, **chosen})
    return built.as_text(), built.memory_analysis().temp_size_in_bytes
