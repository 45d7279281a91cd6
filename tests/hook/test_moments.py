"""Optimizers whose state has other shapes than the parameters, in an `nnx.Optimizer` of a sharded model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from selection import others_full

import gtp_jax as gtp

from .models import F64
from .steps import assert_equal, train

OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "novograd": optax.novograd(1e-2),
    "chain": optax.chain(optax.clip_by_global_norm(0.1), optax.adafactor(1e-2, min_dim_size_to_factor=8)),
}


class Block(nnx.Module):
    """Has a kernel that the library shards, and a bias that is partitioned as annotated."""

    def __init__(self, rngs, annotated):
        bias = nnx.initializers.normal()
        bias = nnx.with_partitioning(bias, ("tp",)) if annotated else bias
        self.linear = nnx.Linear(16, 16, bias_init=bias, rngs=rngs, **F64)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


def make(annotated):
    return nnx.Sequential(*[Block(nnx.Rngs(i), annotated) for i in range(2)])


def loss(model, x):
    return jnp.sin(3 * model(x)).mean()


@pytest.mark.parametrize("name", others_full(OPTIMIZERS, ["adafactor"]))
def test_factors_and_other_shapes_train_as_on_one_device(name, x64):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)))
    wanted = train(make(False), loss, x, optimizer=OPTIMIZERS[name])
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        model = gtp.shard(make(True), Block, min_size=64)
        assert_equal(train(model, loss, x, optimizer=OPTIMIZERS[name]), wanted)


@pytest.mark.filterwarnings("error:Variable hooks")  # which Flax deprecates
def test_an_optimizer_that_a_program_makes_has_shards_of_moments_and_whole_factors(x64):
    both = optax.chain(optax.scale_by_adam(), OPTIMIZERS["adafactor"])
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        model = gtp.shard(make(False), Block, min_size=64)
        optimizer = nnx.jit(lambda model: nnx.Optimizer(model, both, wrt=nnx.Param))(model)
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(optimizer)):
        assert leaf.addressable_shards[0].data.size == leaf.size // (8 if leaf.shape == (16, 16) else 1), path
