"""Recipes, and models of stock layers that are trained and compared under them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gtp_jax as gtp

from .steps import MESHES, scope

RECIPES = {
    "FP8": gtp.FP8(),
    "MXFP8": gtp.MXFP8(),
    "NVFP4": gtp.NVFP4(),
    "NVFP4 of 1 x 16": gtp.NVFP4(block=(1, 16)),
    "FP8Blocks": gtp.recipes.FP8Blocks(),  # a tile may lie in the shards of several ranks
}
ALL_MESHES = {**MESHES, "gtp 4, tp 2": dict(gtp=4, tp=2)}


INIT = nnx.initializers.lecun_normal()


def kernel_init(*names, init=INIT):
    return nnx.with_partitioning(init, names)


WIDTH, LENGTH, VOCAB, BATCH = 32, 32, 64, 16


class Block(nnx.Module):
    def __init__(self, rngs):
        self.heads = nnx.LinearGeneral(WIDTH, (4, 8), rngs=rngs)
        self.out = nnx.LinearGeneral((4, 8), WIDTH, axis=(-2, -1), rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.out(jnp.tanh(self.heads(x)))
        return x + self.down(jnp.tanh(self.up(x)))


class Model(nnx.Module):
    """Blocks, of which one is called again inside `nnx.remat`, and an array that the model owns itself."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (LENGTH, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        x = nnx.remat(lambda block, x: block(x))(self.blocks[1], x)
        return self.head(x)


def loss(model, tokens):
    return gtp.cross_entropy(model(tokens), jnp.roll(tokens, 1, axis=1))


def mean_loss(model, tokens):
    total, count = loss(model, tokens)
    return total / count


def tokens():
    return jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (BATCH, LENGTH)))


def flat(gradients):
    return {jax.tree_util.keystr(path): np.asarray(g) for path, g in jax.tree_util.tree_leaves_with_path(gradients)}


def assert_near(found, wanted, tolerance=2e-5):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=tolerance * np.abs(array).max(), err_msg=name)


def sharded(rngs):
    return gtp.shard(Model(rngs), "blocks.*", min_size=64)


@functools.cache
def _drawn():
    graph, state = nnx.split(nnx.jit(lambda: Model(nnx.Rngs(0)))())
    return graph, jax.tree.map(np.asarray, state)


def drawn_model():
    """A model that is not sharded, of arrays that are drawn once."""
    graph, state = _drawn()
    return nnx.merge(graph, jax.device_put(state))


def of_drawn_arrays():
    """A sharded model, whose arrays are drawn once: each mesh and recipe in scope would compile the draws anew."""
    return gtp.shard(drawn_model(), "blocks.*", min_size=64)


def trained(mesh, steps=3, **options):
    optimizer = optax.adamw(1e-2, eps=1e-3)
    with scope(ALL_MESHES[mesh]):
        state = gtp.TrainState.create(of_drawn_arrays(), optimizer)
        step = gtp.train_step(loss, optimizer, **options)
        losses = []
        for _ in range(steps):
            state, metrics = step(state, tokens())
            losses.append(float(metrics["loss"]))
        return {"losses": np.asarray(losses), **flat(state.params)}


class Dense(nnx.Module):
    """Blocks that multiply by their weights in several ways, or layers of gtp_jax's own that do the same."""

    def __init__(self, rngs, own, hidden=64, tp=False, dtype=jnp.float32, init=INIT):
        self.blocks = nnx.List([])
        for sizes, names in (((64, hidden), (None, "tp")), ((hidden, 64), ("tp", None))):
            options = dict(use_bias=False, dtype=dtype, rngs=rngs, kernel_init=init)
            if tp:
                parallel = "row" if names[0] else "column"
                options |= dict(parallel=parallel) if own else dict(kernel_init=kernel_init(*names, init=init))
            self.blocks.append((gtp.Dense if own else nnx.Linear)(*sizes, **options))

    def __call__(self, x):
        up, down = self.blocks
        return x + jnp.tanh(down(jnp.tanh(up(x))))


FP8 = gtp.FP8(matmuls=True)
MATMULS = {
    "FP8": FP8,
    "MXFP8": gtp.MXFP8(matmuls=True),
    "NVFP4": gtp.NVFP4(matmuls=True, stochastic=False),
    "FP8Blocks": gtp.recipes.FP8Blocks(),
}
