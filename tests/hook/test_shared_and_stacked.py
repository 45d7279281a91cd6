"""Modules that several others share, stacked weights that a scan slices, and gtp_jax's own stacks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import gtp_jax as gtp

from .models import F64, WIDTH
from .steps import MESHES, assert_equal, scope, together


def mean(model, x):
    return jnp.sin(3 * model(x)).mean()


def inputs():
    return jnp.asarray(np.random.default_rng(0).normal(size=(16, WIDTH)))


class Sharing(nnx.Module):
    """A block that uses a module of the model around it."""

    def __init__(self, shared, rngs):
        self.shared, self.own = shared, nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64)

    def __call__(self, x):
        return x + jnp.tanh(self.shared(jnp.sin(self.own(x))))


class SharingModel(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.entry = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64)
        self.blocks = nnx.List([Sharing(self.entry, rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.entry(x)


def test_a_module_that_several_blocks_hold_has_the_sum_of_its_gradients(x64):
    found, wanted = together(SharingModel, mean, inputs(), MESHES["gtp 8"], blocks="blocks.*")
    assert_equal(found, wanted)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs, **F64)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs, **F64)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Scanned(nnx.Module):
    """Layers whose weights are stacked, and which run in a scan."""

    def __init__(self, length=3):
        self.layers = nnx.vmap(Block)(nnx.Rngs(0).fork(split=length))

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def test_layers_that_a_scan_takes_apart_are_gathered_one_by_one(x64):
    found, wanted = together(Scanned, mean, inputs(), MESHES["gtp 8"], blocks=Block)
    assert_equal(found, wanted)


def test_a_scan_over_a_dimension_that_is_sharded_is_refused(x64):
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(Scanned(8), Block, min_size=64, specs={"layers.up.kernel": P("gtp")})
        with pytest.raises(ValueError, match=r"a weight of 3 dimensions.*holds an array of shape \(16, 32\).*`specs`"):
            model(inputs())


class Stacked(nnx.Module):
    """A `Stack` of blocks with a plain layer in them, and a plain head."""

    def __init__(self, rngs):
        self.stack = gtp.Stack(Block, length=2, rngs=rngs)
        self.heads = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64) for _ in range(2)])

    def __call__(self, x):
        x = self.stack(x)
        for head in self.heads:
            x = head(x)
        return x


@pytest.mark.filterwarnings("ignore:no mesh is in scope")
def test_what_is_in_a_stack_is_left_alone(x64):
    def loss(degrees, factory):
        with scope(degrees):
            state = gtp.TrainState.create(gtp.init(factory, nnx.Rngs(0)), optax.sgd(0.5))
            step = gtp.train_step(mean, optax.sgd(0.5))
            state, first = step(state, inputs())
            state, second = step(state, inputs())
            return [float(first["loss"]), float(second["loss"])], state

    wanted, _ = loss(None, Stacked)
    found, state = loss(MESHES["gtp 8"], lambda rngs: gtp.shard(Stacked(rngs), min_size=64))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    kernels = state.params["stack"]["layers"]["up"]["kernel"], state.params["heads"]["0"]["kernel"]
    assert [kernel.sharding.is_fully_replicated for kernel in kernels] == [True, False]
    assert jax.tree.leaves(state.model_def.specs)
