"""A step with `nnx.Optimizer` under `nnx.jit` leaves every array where it was, and the next compiles nothing."""

from __future__ import annotations

import jax
import optax
import pytest
from flax import nnx
from selection import others_full

import gtp_jax as gtp


class Block(nnx.Module):
    """Has weights that are sharded, and biases and a norm that stay whole."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(128, rngs=rngs)
        self.up, self.down = nnx.Linear(128, 512, rngs=rngs), nnx.Linear(512, 128, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(512, 128, rngs=rngs)
        self.layers, self.norm = nnx.List([Block(rngs) for _ in range(2)]), nnx.LayerNorm(128, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x))


def loss(model, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens).mean()


@nnx.jit
def step(model, optimizer, tokens):
    optimizer.update(model, nnx.grad(loss)(model, tokens))


DEGREES = [{"dp": 2, "gtp": 2, "tp": 2}, {"gtp": 8}, {"dp": 2, "gtp": 4}]


@pytest.mark.parametrize("degrees", others_full(DEGREES, DEGREES[:1]), ids=str)
def test_a_step_leaves_every_array_where_it_was(degrees, key):
    mesh = gtp.make_mesh(**degrees)
    with jax.set_mesh(mesh):
        model = gtp.shard(nnx.jit(Model)(nnx.Rngs(0)), "layers.*")
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
        tokens = jax.random.randint(key, (8, 32), 0, 512)
        tokens = jax.device_put(tokens, jax.NamedSharding(mesh, jax.P("gtp")))  # XLA is free to use dp
        before = [(array.sharding, array.ndim) for array in jax.tree.leaves(nnx.state((model, optimizer)))]
        step(model, optimizer, tokens)
        after = jax.tree_util.tree_leaves_with_path(nnx.state((model, optimizer)))
    moved = [
        jax.tree_util.keystr(path)
        for (path, array), (place, ndim) in zip(after, before, strict=True)
        if not array.sharding.is_equivalent_to(place, ndim)
    ]
    assert not moved
