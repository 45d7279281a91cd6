"""Recipes send and multiply the same codes of a weight, whether `gtp.shard` stores it padded or not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from padded_states import same
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.hook import sharded_weights

from .padded import F64, MESHES, Stacked, batches, make, on, trained

# a recipe, and how much parameters may differ; products of tiles are summed in float32
RECIPES = {
    "FP8": (gtp.FP8(), 1e-12),
    "NVFP4": (gtp.NVFP4(), 1e-12),
    "MXFP8": (gtp.MXFP8(), 1e-12),
    "FP8 matmuls": (gtp.FP8(matmuls=True), 1e-12),
    "MXFP8 matmuls": (gtp.MXFP8(matmuls=True), 1e-12),
    "FP8 in blocks": (gtp.FP8Blocks(), 1e-6),
}
USUAL = ["NVFP4", "FP8 in blocks", "MXFP8 matmuls", "FP8", "MXFP8", "FP8 matmuls"]


@pytest.mark.parametrize(
    ("name", "mesh", "view"), pairwise(USUAL, ["gtp 7", "gtp 3, dp 2"], ["global", "local"], usual=1)
)
def test_steps_under_a_recipe_are_those_of_one_device(name, mesh, view, x64):
    recipe, atol = RECIPES[name]
    wanted, losses, _ = trained("adamw", recipe=recipe)
    found, own, _ = trained("adamw", tuple(MESHES[mesh].items()), recipe=recipe, view=view)
    np.testing.assert_allclose(own, losses, rtol=10 * atol)
    same(found, wanted, atol)


@pytest.mark.full
@pytest.mark.parametrize(("name", "view"), [("NVFP4", "global"), ("FP8 matmuls", "local"), ("FP8 in blocks", "global")])
def test_steps_of_stacked_weights_under_a_recipe_are_those_of_one_device(name, view, x64):
    recipe, atol = RECIPES[name]
    wanted, losses, _ = trained("adamw", kind=Stacked, recipe=recipe)
    found, own, _ = trained("adamw", tuple(MESHES["gtp 7"].items()), kind=Stacked, recipe=recipe, view=view)
    np.testing.assert_allclose(own, losses, rtol=10 * atol)
    same(found, wanted, atol)


@pytest.mark.parametrize("name", others_full(USUAL[:3], ["NVFP4"]))
def test_where_tp_cuts_blocks_calls_are_those_of_weights_that_are_not_padded(name, x64):
    """On one device, recipes quantize these weights, because nothing cuts their blocks."""
    tokens, found = batches(1)[0], []
    with on(gtp=3, tp=2), gtp.use_recipe(RECIPES[name][0]):
        for pad in (False, True):
            with gtp.even_shares(pad):
                model = make()
            loss = lambda model: jnp.sin(3 * model(tokens)).mean()  # noqa: E731
            value, gradients = nnx.jit(nnx.value_and_grad(loss))(model)
            found.append((np.asarray(value), [np.asarray(v[...]) for _, v in nnx.to_flat_state(gradients)]))
    assert model.last.kernel.get_raw_value().shape == (27, 26)
    same(found[1], found[0], 1e-6 if "blocks" in name else 1e-12)


class Blocks(nnx.Module):
    """Layers of one size, of gtp_jax or of Flax."""

    def __init__(self, rngs, own):
        layer = gtp.Dense if own else nnx.Linear
        self.layers = nnx.List([layer(33, 33, use_bias=False, rngs=rngs, **F64) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


@pytest.mark.parametrize(("wire", "view"), pairwise(["fp8", "mxfp8", "bf16"], ["global", "local"], usual=1))
def test_exchanged_gradients_are_those_of_gtp_jax_own_layers(wire, view, x64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(42, 33))
    kernels = [jnp.asarray(rng.normal(size=(33, 33)) / 6) for _ in range(2)]

    def loss(model, x):
        return jnp.sin(3 * model(x)).sum(), jnp.asarray(float(x.size))

    def gradients(own):
        model = gtp.init(lambda rngs: Blocks(rngs, own), nnx.Rngs(0))
        for layer, kernel in zip(model.layers, kernels, strict=True):
            layer.kernel[...] = kernel
        model = model if own else gtp.shard(model, "layers.*", min_size=80)
        state = gtp.TrainState.create(model, optax.sgd(1.0))
        options = dict(recipe=gtp.BF16(grad_wire=wire), view=view)
        made = jax.jit(lambda state, x: gtp.loss_and_gradients(loss, state, x, **options)[1])(state, x)
        return [np.asarray(one) for one in jax.tree.leaves(made)]

    with on(gtp=7):
        found, wanted = gradients(own=False), gradients(own=True)
    with on(gtp=1):
        plain = gradients(own=False)
    for one, other, exact in zip(found, wanted, plain, strict=True):
        assert {one.shape, other.shape} <= {(35, 33), (33, 35)} and np.abs(exact).max() > 0.01
        assert np.count_nonzero(one) == np.count_nonzero(one[:33, :33]), "the padding is zero"
        one, other = one[:33, :33], other[:33, :33]
        # a sum that is another in its last bit is rounded to another number, if it lies between two
        assert np.mean(np.abs(one - other) > 1e-12) < 0.01 and np.abs(one - other).max() < 0.1 * np.abs(exact).max()
        assert 0 < np.abs(one - exact).max() < 0.1 * np.abs(exact).max()


def test_bytes_on_the_wire_and_shards_are_those_of_the_padded_matrix():
    with on(gtp=7):
        model = gtp.shard(nnx.eval_shape(lambda: nnx.Linear(2230, 64, rngs=nnx.Rngs(0))), nnx.Linear)
        (weight,) = sharded_weights(model, gtp.NVFP4())
    layout = weight.coded.layout
    assert layout.shape == (2230, 64) and layout.array_shape == (2240, 64) and layout.shard_shape == (320, 64)
    assert weight.bytes == 2240 * 64 // 2 + 2240 * 64 // 256, "half a byte for each element, and a scale for each block"
