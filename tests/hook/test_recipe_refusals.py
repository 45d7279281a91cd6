"""Recipes for models of stock layers: what they do not support is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming

import gtp_jax as gtp

from .recipes import BATCH, FP8, WIDTH, Dense, loss, of_drawn_arrays, tokens
from .steps import MESHES, scope

X = np.ones((BATCH, WIDTH), np.float32)


class Writing(nnx.Module):
    def __init__(self, written, rngs):
        self.linear, self.written = nnx.Linear(WIDTH, WIDTH, rngs=rngs), written

    def __call__(self, x):
        self.linear.kernel.set_value(self.written(self.linear.kernel[...]))
        return self.linear(x)


@pytest.mark.parametrize(
    "written", [lambda kernel: jnp.clip(kernel, -10, 10), lambda kernel: np.ones(kernel.shape, kernel.dtype)]
)
def test_writing_a_quantized_weight_is_refused(written):
    with scope(MESHES["gtp 8"]), gtp.use_recipe(gtp.NVFP4()):
        made = nnx.jit(lambda: nnx.Sequential(*(Writing(written, nnx.Rngs(i)) for i in range(2))))()
        model = gtp.shard(made, Writing, min_size=64)
        with pytest.raises(ValueError, match=naming("writes layers.0.linear.kernel")):
            jax.eval_shape(model, X)


class Holder(nnx.Module):
    def __init__(self, rngs, wrap=nnx.remat):
        self.wrap, self.blocks = wrap, nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.scale = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))

    def __call__(self, x):
        return self.wrap(lambda self, x: self.blocks[1](self.blocks[0](x @ self.scale[...])))(self, x)


def test_a_quantized_weight_that_flax_passes_through_its_owners_method_is_refused():
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(nnx.jit(Holder)(nnx.Rngs(0)), "blocks.*", min_size=64)
        scale = np.asarray(model.scale.get_value())
        with gtp.use_recipe(gtp.NVFP4()), pytest.raises(ValueError, match=naming("writes scale block")):
            nnx.jit(lambda model, x: model(x))(model, X)
        np.testing.assert_array_equal(model.scale.get_value(), scale)


def test_patterns_that_match_nothing_are_refused():
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(nnx.jit(lambda: Holder(nnx.Rngs(0), wrap=lambda call: call))(), "blocks.*", min_size=64)
        with pytest.raises(ValueError, match=naming("'mlp' blocks.0.kernel")):
            gtp.explain(model, gtp.NVFP4(exclude=("mlp",)))


REFUSED = {
    "layers": (gtp.NVFP4(high_precision_last=1), "`high_precision_last` `exclude`"),
    "attention": (
        gtp.FP8(matmuls=True, attention=True),
        "`gtp_jax.Attention` `gtp_jax.nn.CrossAttention` attention=False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_sharded_models_do_not_support_is_refused(name):
    recipe, message = REFUSED[name]
    with scope(MESHES["gtp 8"]):
        model = of_drawn_arrays()
        with pytest.raises(ValueError, match=naming(message)):
            gtp.explain(model, recipe)
        with pytest.raises(ValueError, match=naming(message)), gtp.use_recipe(recipe):
            model(tokens())
        with pytest.raises(ValueError, match=naming(message)):
            state = gtp.TrainState.create(model, optax.sgd(0.1), recipe=recipe)
            gtp.train_step(loss, optax.sgd(0.1), recipe=recipe)(state, tokens())


def test_second_derivatives_of_fp8_matmuls_are_refused():
    x = jnp.ones((BATCH, 64))
    with scope(MESHES["gtp 8"]), gtp.use_recipe(FP8):
        model = gtp.shard(nnx.jit(lambda: Dense(nnx.Rngs(0), own=False))(), "blocks.*", min_size=64)
        inner = lambda x: jax.grad(lambda x: jnp.sin(model(x)).sum())(x)  # noqa: E731
        with pytest.raises(TypeError, match=naming("`linear_fp8`")):
            jax.eval_shape(jax.grad(lambda x: (inner(x) ** 2).sum()), x)
