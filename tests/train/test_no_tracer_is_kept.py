"""When a step has been traced, nothing of the trace is alive: not in the caches of what its loss calls either."""

from __future__ import annotations

import gc

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from selection import pairwise

import gtp_jax as gtp


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense = gtp.Dense(32, 32, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.dense(x))


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.blocks = gtp.Stack(lambda rngs: Block(rngs), 2, rngs=rngs)

    def __call__(self, x):
        return self.blocks(x)


class Stock(nnx.Module):
    """Blocks that `gtp.shard` shards."""

    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(2)])
        gtp.shard(self, "blocks.*", min_size=64)

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return x


# At module level, as functions that are jitted usually are: their caches live as long.
@nnx.jit
def jitted(model, x):
    return model(x)


@nnx.remat
def recomputed(model, x):
    return model(x)


@jax.jit
def doubled(x):
    return 2 * x


CALLS = {
    "plain": lambda model, x: model(x),
    "nnx.jit": jitted,
    "nnx.remat": recomputed,
    "jax.jit": lambda model, x: doubled(model(x)),
}

# A layer alone on one device: of a `shard_map` with `jax.checkpoint` and a collective in it, jax 0.12.0 itself keeps
# what it has linearized.
MODELS = {"layer": (Block, {"gtp": 1}), "stack": (Stacked, {"gtp": 2, "dp": 2}), "sharded": (Stock, {"gtp": 2})}


@pytest.fixture
def thawed():
    """Lets the collector see older objects again when the test is over."""
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
@pytest.mark.parametrize("kind, call, recipe", pairwise(MODELS, CALLS, [None, gtp.FP8()]))
def test_no_tracer_is_alive_after_a_trace(kind, call, recipe):
    make, sizes = MODELS[kind]
    with jax.set_mesh(gtp.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])):
        state = gtp.TrainState.create(gtp.nn.abstract_model(make), optax.sgd(1.0))
        step = gtp.train_step(lambda model, x: jnp.mean(CALLS[call](model, x) ** 2), optax.sgd(1.0), recipe=recipe)
        gc.freeze()  # what a worker already has is neither walked nor found
        step.trace(state, jax.ShapeDtypeStruct((8, 32), jnp.float32))
        gc.collect()
        left = [found.aval for found in gc.get_objects() if isinstance(found, jax.core.Tracer)]
    assert not left
