"""In local view, code reads gathered weights, or is refused: a rank's shard is never taken for the weight."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp

from .steps import scope

WIDTH = 16


class Block(nnx.Module):
    """A block with a method of another name than `__call__`."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))

    def forward(self, x):
        return self(x)

    def gram(self):
        return self.linear.kernel[...] @ self.linear.kernel.T

    def size(self):
        return self.linear.kernel.get_raw_value().size


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.scale = nnx.Param(jnp.linspace(0.5, 1.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH))

    def __call__(self, x):
        for block in self.blocks:
            x = block.forward(x) @ self.scale[...]
        return x


def make(methods=("__call__",)):
    return lambda rngs: gtp.shard(Model(rngs), "blocks.*", min_size=64, methods=methods)


def computed(loss, view, factory=None, run=gtp.loss_and_gradients):
    with scope(dict(gtp=8)):
        state = gtp.TrainState.create((factory or make())(nnx.Rngs(0)), optax.sgd(1.0))
        return jax.tree.map(np.asarray, run(loss, state, jnp.ones((8, WIDTH)), view=view))


def called(model, x):
    return jnp.sum(model(x)), jnp.float32(x.shape[0])


def penalized(model, x):
    value, count = called(model, x)
    return value + sum(jnp.sum(jnp.square(block.gram())) for block in model.blocks) * count, count


def test_methods_around_calls_and_parameters_of_the_model_itself_are_those_of_global_view(x64):
    np.testing.assert_allclose(computed(called, "local")[0], computed(called, "global")[0], rtol=1e-12)


def test_a_method_that_reads_a_weight_is_refused_by_the_weights_name():
    message = (
        "the weight blocks.0.linear.kernel is read in local view outside of a call that gathers it: each rank would "
        "compute with its shard, of shape (2, 16). If a public method of the weight's block (or of its module, outside "
        "of blocks) reads the weight, name the method in `methods`"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        computed(penalized, "local")


def test_it_is_right_once_it_is_named_and_in_global_view(x64):
    one = computed(penalized, "local", make(("__call__", "gram")))
    other = computed(penalized, "global")
    for found, wanted in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)


def test_a_loss_that_reads_a_weight_is_refused_and_may_read_the_shard():
    def read(model, x):
        value, count = called(model, x)
        return value + jnp.sum(model.blocks[0].linear.kernel[...]), count

    def read_shard(model, x):
        value, count = called(model, x)
        return value + jnp.sum(model.blocks[0].linear.kernel.get_raw_value()) + 0 * model.blocks[0].size(), count

    with pytest.raises(ValueError, match=r"the weight blocks\.0\.linear\.kernel is read in local view"):
        computed(read, "local")
    assert np.isfinite(computed(read_shard, "local")[0])
    assert np.isfinite(computed(read, "global")[0])


def test_a_hook_of_the_models_author_still_runs():
    def doubled(variable, value):
        return 2 * value

    class Doubling(Model):
        def __init__(self, rngs):
            super().__init__(rngs)
            for block in self.blocks:
                block.linear.kernel.set_metadata(on_get_value=doubled)

    plain = Doubling(nnx.Rngs(0))(jnp.ones((8, WIDTH)))
    with scope(dict(gtp=8)):
        model = gtp.shard(Doubling(nnx.Rngs(0)), "blocks.*", min_size=64)
        np.testing.assert_allclose(model(jnp.ones((8, WIDTH))), plain, rtol=1e-5)
