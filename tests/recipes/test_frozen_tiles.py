"""A frozen base in tiles of FP8 that shards may cut: its codes are one device's, travel as they are, and are trained
over, saved and multiplied like those of masters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints

from ..ops import oracle
from .test_recipe_parity import scope

WIDTH = 192
RECIPE = gtp.recipes.FP8Blocks(exclude=())
# sizes of kernels that share a gather; degrees; the layer's parallelism
PLACES = {
    "columns": ((7,), dict(gtp=4), {}),
    "kernels of whole tiles": ((256, 512), dict(gtp=2), {}),
    "kernels of odd sizes": ((200, 72), dict(gtp=4), {}),
    "parts of dp": ((256, 64), dict(gtp=2, dp=4), {}),
    "parallel by column": ((512, 256), dict(gtp=2, tp=2), dict(parallel="column")),
    "padded kernels": ((200, 72), dict(gtp=7), {}),
}
USUAL = ("kernels of whole tiles",)


@functools.cache
def numbers(shape):
    rng = np.random.default_rng(shape[1])
    kernel = (rng.normal(size=shape) * np.exp(3 * rng.normal(size=shape))).astype(np.float32)
    kernel[:, :1] = 0
    return kernel


class Layer(nnx.Module):
    def __init__(self, sizes, rngs, **options):
        made = dict(zip(sizes, map(numbers, ((WIDTH, size) for size in sizes)), strict=True))
        self.dense = gtp.Dense(
            WIDTH,
            {str(size): size for size in sizes},
            dtype="float32",
            kernel_init=lambda _, shape, __: made[shape[1]],
            rngs=rngs,
            **options,
        )
        self.lora = nnx.LoRA(WIDTH, 1, 1, rngs=rngs)

    def __call__(self, x):
        return self.dense(x)


def of_values(model):
    """The model, which multiplies the values of its codes."""
    model = nnx.clone(model)
    for _, v in nnx.to_flat_state(nnx.state(model, gtp.nn.Frozen)):
        v.set_metadata(frozen=v.get_metadata()["frozen"]._replace(operands=None))
    return model


@pytest.mark.parametrize("place", others_full(PLACES, USUAL))
def test_codes_and_products_are_those_of_one_device_by_the_oracle(place):
    sizes, degrees, options = PLACES[place]
    with scope(degrees), gtp.layout.even_shares():
        model = gtp.init(lambda rngs: gtp.nn.freeze(Layer(sizes, rngs, **options), RECIPE), nnx.Rngs(0))
        x = jnp.repeat(jnp.eye(336, WIDTH)[:, None], 8, axis=1)  # a batch and a sequence that ranks divide
        products = [jax.jit(lambda model, x: model(x))(m, x) for m in (model, of_values(model))]
        for size in sizes:
            kernel = model.dense.kernel[str(size)]
            codes = jax.tree.map(np.asarray, kernel.get_value())
            wanted = oracle.rounded_blocked(numbers((WIDTH, size)).T, (128, 128))
            assert codes.scales.shape == (-(-size // 128), 2) and codes.codes.dtype == np.uint8
            np.testing.assert_array_equal(np.asarray(gtp.ops.dequantize(codes, jnp.float32)), wanted)
            for product in products:
                np.testing.assert_array_equal(np.asarray(product[str(size)])[:WIDTH, 0], wanted.T)
            stored = kernel.get_raw_value().codes
            shards = kernel.get_metadata()["layout"].shards
            assert {one.data.nbytes for one in stored.addressable_shards} == {stored.nbytes // shards}


class Block(nnx.Module):
    """Fused kernels, which 8 ranks cut."""

    def __init__(self, rngs):
        self.mlp = gtp.MLP(64, 192, dtype="float32", rngs=rngs)
        start = nnx.initializers.normal(0.1)
        self.lora = nnx.LoRA(64, 2, 64, b_initializer=start, rngs=rngs)

    def __call__(self, x):
        return x + self.mlp(x) + self.lora(x)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = gtp.Stack(lambda rngs: Block(rngs), 2, rngs=rngs)
        self.last = gtp.Dense(64, {"a": 32, "b": 64}, dtype="float32", rngs=rngs)

    def __call__(self, x):
        found = self.last(self.blocks(x))
        return jnp.concatenate([found["a"], found["b"]], -1)


def frozen(rngs):
    return gtp.nn.freeze(Model(rngs), RECIPE)


def loss(model, batch):
    errors = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, -1)
    return errors.sum(), jnp.float32(errors.size)


def batch():
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=(8, 4, size)).astype(np.float32) for name, size in (("x", 64), ("y", 96))}


class Adapted(nnx.Module):
    """One layer behind the adapter, whose gradient has come through the tiles."""

    def __init__(self, rngs):
        self.lora = nnx.LoRA(64, 2, 64, b_initializer=nnx.initializers.normal(0.1), rngs=rngs)
        self.last = gtp.Dense(64, {"a": 32, "b": 64}, dtype="float32", rngs=rngs)

    def __call__(self, x):
        found = self.last(x + self.lora(x))
        return jnp.concatenate([found["a"], found["b"]], -1)


ADAPTED = [(Adapted, dict(gtp=2)), (Model, dict(gtp=4)), (Model, dict(gtp=2, dp=2))]


@pytest.mark.parametrize("model, degrees", others_full(ADAPTED, ADAPTED[:1]), ids=str)
def test_losses_and_gradients_of_adapters_are_those_of_masters_under_the_recipe_bit_for_bit(model, degrees):
    found = []
    for make, recipe in ((lambda rngs: gtp.nn.freeze(model(rngs), RECIPE), None), (model, RECIPE)):
        with scope(degrees):
            state = gtp.TrainState.create(gtp.init(make, nnx.Rngs(0)), optax.identity())
            run = jax.jit(lambda s, x, recipe=recipe: gtp.train.loss_and_gradients(loss, s, x, recipe=recipe))
            value, gradients = run(state, batch())
            lora = gradients["lora"] if model is Adapted else gradients["blocks"]["layers"]["lora"]
            found.append(jax.tree.map(np.asarray, (value, lora)))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(found[0][1]))


@pytest.mark.full
def test_adapters_train_over_codes_that_restore_on_other_meshes(tmp_path):
    meshes = ((dict(gtp=4), False), (dict(gtp=7), True), (dict(gtp=2, dp=2), False))
    optimizer, losses, digests = optax.adamw(1e-2), [], []
    rows = {name: np.tile(x, (7, 1, 1)) for name, x in batch().items()}
    with Checkpoints(tmp_path) as checkpoints:
        for number, (degrees, even) in enumerate(meshes):
            with scope(degrees), gtp.layout.even_shares(even):
                state = gtp.TrainState.create(gtp.init(frozen, nnx.Rngs(number)), optimizer)
                if number:
                    state, _ = checkpoints.restore(state)
                checkpoints.save(number, state)
                checkpoints.wait()
                digests.append({name: one["digest"] for name, one in checkpoints.manifest()["leaves"].items()})
                step = gtp.train_step(loss, optimizer)
                state, first = step(state, rows)
                losses.append([float(first["loss"]), float(step(state, rows)[1]["loss"])])
    assert all(one == digests[0] for one in digests)
    assert all(second < first for first, second in losses)
    np.testing.assert_allclose(losses, [losses[0]] * 3, rtol=1e-4)


class Experts(nnx.Module):
    def __init__(self, rngs):
        self.moe = gtp.nn.MoE(128, 256, num_experts=4, top_k=2, aux_loss_coeff=0.0, dtype="float32", rngs=rngs)
        self.lora = nnx.LoRA(128, 2, 128, rngs=rngs)

    def __call__(self, x):
        return self.moe(x) + self.lora(x)


@pytest.mark.full
@pytest.mark.parametrize("degrees", [dict(gtp=2, ep=2)], ids=str)
def test_experts_are_frozen_in_tiles_of_their_own_and_multiply_as_masters_do(degrees):
    x = np.random.default_rng(0).normal(size=(8, 4, 128)).astype(np.float32)
    found, codes = [], []
    for degrees_, make, recipe in (({"gtp": 1}, True, None), (degrees, True, None), (degrees, False, RECIPE)):
        with scope(degrees_):
            model = gtp.init(
                lambda rngs, make=make: gtp.nn.freeze(Experts(rngs), RECIPE) if make else Experts(rngs), nnx.Rngs(0)
            )
            with gtp.use_recipe(recipe):
                found.append(np.asarray(jax.jit(lambda model, x: model(x))(model, x)))
            if make:
                codes.append(jax.tree.map(np.asarray, [model.moe.up.kernel[k].get_value() for k in ("gate", "up")]))
    np.testing.assert_array_equal(found[1], found[2])
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, *codes)


def test_tensor_ranks_that_would_cut_tiles_are_refused():
    with scope(dict(gtp=2, tp=2)):
        with pytest.raises(ValueError, match=naming("dense 96 FP8_BLOCKS")):
            gtp.init(lambda rngs: gtp.nn.freeze(Layer((192,), rngs, parallel="column"), RECIPE), nnx.Rngs(0))
