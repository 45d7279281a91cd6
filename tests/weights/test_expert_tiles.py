"""Experts in tiles that shards may cut: products have the codes and scales of one device, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from selection import others_full

import gtp_jax as gtp

from ..ops import oracle
from .test_tiles import numbers, scope

EXPERTS, WIDTH = 4, 192
TILE = (128, 128)
RECIPE = gtp.recipes.FP8Blocks(exclude=())
# rows of each kernel; degrees; the layer's options
PLACES = {
    "parts of tiles": ((256, 512), dict(gtp=8), {}),
    "kernels of odd sizes": ((200, 72), dict(gtp=4), {}),
    "gtp 4 x ep 2": ((256, 64), dict(gtp=4, ep=2), dict(experts_axis="ep")),
    "features over tp": ((512, 256), dict(gtp=2, tp=2, ep=2), dict(experts_axis="ep", parallel="column")),
    "experts over tp and ep": ((256, 64), dict(gtp=2, tp=2, ep=2), dict(experts_axis="ep", parallel="expert")),
    "experts unevenly over tp": ((256, 64), dict(gtp=2, tp=3), dict(parallel="expert")),
    "gathered over tp too": ((256, 64), dict(gtp=2, tp=2), dict(axes=("tp", "gtp"))),
    "dp shards too": ((256, 64), dict(dp=2, gtp=2), dict(axes=("dp", "gtp"))),
    "stored in parts over dp": ((256, 64), dict(dp=2, gtp=4), {}),
}


def kernels_of(sizes):
    """Kernels whose experts differ in size by powers of e."""
    rng = np.random.default_rng(5)
    factors = np.exp(4 * rng.normal(size=(EXPERTS, 1, 1))).astype(np.float32)
    return {size: np.stack([numbers((size, WIDTH + e))[:, :WIDTH] for e in range(EXPERTS)]) * factors for size in sizes}


def layer_of(kernels, sizes, options):
    """A layer of these kernels, which the initializer finds by their rows."""
    out = {str(i): size for i, size in enumerate(sizes)}
    options = dict(dtype="float32", kernel_init=lambda _, shape, __: jnp.asarray(kernels[shape[1]]), **options)
    return gtp.init(lambda rngs: gtp.nn.GroupedDense(EXPERTS, WIDTH, out, rngs=rngs, **options), nnx.Rngs(0))


@pytest.mark.parametrize("place", others_full(PLACES, list(PLACES)[4:5]))
def test_experts_multiply_the_values_of_one_device(place):
    """Both kernels of a gather: a product with the identity is the weight."""
    sizes, degrees, options = PLACES[place]
    kernels = kernels_of(sizes)
    with scope(degrees), gtp.use_recipe(RECIPE):
        layer = layer_of(kernels, sizes, options)
        graph, state = nnx.split(layer)
        own, here = layer.own_experts, jax.tree.map(lambda a: a.sharding.spec, state)
        x = jnp.tile(jnp.eye(WIDTH), (own, 1))
        run = lambda state, x: nnx.merge(graph, state)(x, jnp.full(own, WIDTH, jnp.int32))  # noqa: E731
        specs = P(options.get("experts_axis"), "tp" if options.get("parallel") == "column" else None)
        found = jax.jit(jax.shard_map(run, in_specs=(here, P()), out_specs=specs, check_vma=False))(state, x)
    for name, size in enumerate(sizes):
        products = np.asarray(found[str(name)]).reshape(EXPERTS, WIDTH, size)
        for expert in range(EXPERTS):
            wanted = oracle.rounded_blocked(kernels[size][expert], TILE)
            np.testing.assert_array_equal(products[expert].T, wanted.astype(np.float32))


class Model(nnx.Module):
    """A stack of experts, and a dense layer."""

    def __init__(self, rngs, experts=None, **options):
        sizes = dict(num_experts=EXPERTS, top_k=2, dtype="float32", **(experts or {}))
        make = lambda rngs: gtp.nn.MoE(128, 256, rngs=rngs, **sizes)  # noqa: E731
        self.blocks = gtp.Stack(make, 2, rngs=rngs)
        self.last = gtp.Dense(128, 256, dtype="float32", rngs=rngs, **options)

    def __call__(self, x):
        return self.last(self.blocks(x))


def test_ranks_with_different_parts_of_a_kernel_keep_their_own_scales():
    """Experts that are gathered over tp are reduced over it, but not the columns of a dense layer that tp divides."""
    kernel = numbers((128, 256)) * np.repeat(np.float32([1, 1e4]), 128)
    with scope(dict(gtp=2, tp=2)):
        init = lambda _, shape, __: jnp.asarray(kernel)  # noqa: E731
        experts, dense = dict(axes=("tp", "gtp"), parallel=None), dict(parallel="column", kernel_init=init)
        model = gtp.init(lambda rngs: Model(rngs, experts, **dense), nnx.Rngs(0))

        def loss(model, batch):
            found = model.last(batch["x"])
            return (jnp.sum(found), jnp.float32(1)), {"found": found}

        state = gtp.TrainState.create(model, optax.sgd(0.1))
        x = jnp.tile(jnp.eye(128)[:, None], (1, 2, 1))
        found = gtp.eval_step(loss, has_aux=True, recipe=RECIPE)(state, {"x": x})["aux"]["found"]
    wanted = oracle.rounded_blocked(kernel.T, TILE).T
    np.testing.assert_array_equal(np.asarray(found)[:, 0], wanted.astype(np.float32))
