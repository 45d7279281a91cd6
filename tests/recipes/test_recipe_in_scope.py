"""The recipe in scope reaches models that no `train_step` trains: NNX under `nnx.jit`, and Linen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nn import abstract_model

from .oracles import matrix

CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=128,
    dtype="float32",
)  # fmt: skip
CASES = {
    "layers and modules": (
        gtp.NVFP4(high_precision_first=1, override={"mlp.down": gtp.MXFP8(), "head": gtp.FP8()}),
        dict(gtp=2, tp=2),
    ),
    "matmuls": (gtp.FP8(matmuls=True), dict(gtp=4)),
    "gradients": (gtp.MXFP8(grad_wire="bf16"), dict(gtp=4)),
}


@pytest.fixture
def tokens():
    rng = np.random.default_rng(1)
    return {name: rng.integers(0, 128, (8, 16)).astype(np.int32) for name in ("tokens", "targets")}


def mean_loss(model, batch):
    total, count = gtp.cross_entropy(model(batch["tokens"]), batch["targets"])
    return total / count


def test_two_recipes_around_one_jitted_function_give_each_ones_numbers():
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    with jax.set_mesh(gtp.make_mesh(gtp=4)):
        layer = gtp.init(lambda rngs: gtp.Dense(64, 128, dtype=jnp.float32, rngs=rngs), nnx.Rngs(0))
        call = nnx.jit(lambda layer, x: layer(x))
        found = {}
        for name, recipe in {"none": None, "fp8": gtp.FP8(), "nvfp4": gtp.NVFP4(), "none again": None}.items():
            with gtp.use_recipe(recipe):
                found[name] = np.asarray(call(layer, x))
    kernel = np.asarray(layer.kernel.get_value())
    for name, recipe in {"fp8": gtp.FP8(), "nvfp4": gtp.NVFP4()}.items():
        wanted = np.asarray(x) @ matrix(kernel.T, recipe.wire, np.float32).T
        np.testing.assert_allclose(found[name], wanted, atol=1e-5)
        assert np.abs(found[name] - found["none"]).max() > 1e-2
    np.testing.assert_array_equal(found["none"], found["none again"])


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_nnx_optimizer_takes_the_steps_of_train_step(name, tokens):
    (recipe, degrees), optimizer = CASES[name], optax.sgd(0.1)
    with jax.set_mesh(gtp.make_mesh(**degrees)):
        model = gtp.init(lambda rngs: Llama(CONFIG, rngs=rngs), nnx.Rngs(0))
        state = gtp.TrainState.create(nnx.clone(model), optimizer)
        step = gtp.train_step(next_token_loss, optimizer, recipe=recipe)
        trained = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

        @nnx.jit
        def by_nnx(model, trained, batch):
            loss, gradients = nnx.value_and_grad(mean_loss)(model, batch)
            trained.update(model, gradients)
            return loss

        with gtp.use_recipe(recipe):
            losses = [float(by_nnx(model, trained, tokens)) for _ in range(2)]
        wanted = []
        for _ in range(2):
            state, metrics = step(state, tokens)
            wanted.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_a_linen_module_under_two_recipes_has_the_output_and_gradients_at_quantized_weights():
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        bridged = nnx.bridge.to_linen(gtp.Dense, 64, 256, parallel="column", dtype=jnp.float32)
        variables = jax.jit(bridged.init)(jax.random.key(1), x)

        def loss(variables, x):
            return jnp.sum(jnp.sin(bridged.apply(variables, x)))

        call = jax.jit(jax.value_and_grad(loss))
        kernel = np.asarray(jax.tree.leaves(variables)[0])
        losses = {}
        for name, recipe in {"fp8": gtp.FP8(exclude=()), "nvfp4": gtp.NVFP4(exclude=()), "none": None}.items():
            with gtp.use_recipe(recipe):
                losses[name], gradients = call(variables, x)
            used = kernel if recipe is None else matrix(kernel.T, recipe.wire, np.float32).T
            wanted = np.asarray(x) @ used
            np.testing.assert_allclose(losses[name], np.sum(np.sin(wanted)), atol=2e-2)
            np.testing.assert_allclose(jax.tree.leaves(gradients)[0], np.asarray(x).T @ np.cos(wanted), atol=1e-3)
    assert len({round(float(value), 2) for value in losses.values()}) == 3


def test_layers_that_gather_their_own_follow_keep_first_and_keep_last():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.dense = gtp.Dense(64, 64, dtype=jnp.float32, rngs=rngs)
            self.mean = nnx.BatchStat(jnp.zeros(()))  # so that the stack is computed on global arrays

        def __call__(self, x):
            self.mean.set_value(jnp.mean(x))
            return x + self.dense(x)

    x = np.random.default_rng(0).normal(size=(8, 4, 64)).astype(np.float32)
    recipe = gtp.NVFP4(high_precision_first=1, high_precision_last=1)
    with jax.set_mesh(gtp.make_mesh(gtp=4)):
        stack = gtp.init(lambda rngs: gtp.Stack(lambda rngs: Block(rngs), 4, rngs=rngs), nnx.Rngs(0))
        kernels = np.asarray(stack.layers.dense.kernel.get_value())
        with gtp.use_recipe(recipe):
            found = nnx.jit(lambda stack, x: stack(x))(stack, x)
    wanted = np.asarray(x)
    for layer, kernel in enumerate(kernels):
        used = matrix(kernel.T, recipe.wire, np.float32).T if 1 <= layer < 3 else kernel
        wanted = wanted + wanted @ used
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_an_abstract_model_that_is_filled_with_values_knows_its_paths_as_one_that_was_created():
    """So models that were restored from a checkpoint do."""
    make = lambda rngs: nnx.List([gtp.Dense(64, 64, rngs=rngs) for _ in range(2)])  # noqa: E731
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        created = gtp.init(make, nnx.Rngs(0))
        restored = abstract_model(make)
        nnx.update(restored, nnx.state(created))
        x = jnp.ones((8, 64), jnp.bfloat16)
        with gtp.use_recipe(gtp.NVFP4(exclude=("0",))):
            call = nnx.jit(lambda layers, x: [layer(x) for layer in layers])
            jax.tree.map(np.testing.assert_array_equal, call(restored, x), call(created, x))
    assert nnx.graphdef(restored) == nnx.graphdef(created)


def test_what_cannot_be_done_is_refused():
    with pytest.raises(ValueError, match=naming("NVFP4 stochastically `stochastic=False`")):
        gtp.use_recipe(gtp.FP8(override={"a": gtp.NVFP4(matmuls=True)}))
    x = jnp.ones((8, 64), jnp.bfloat16)
    unnamed = gtp.Dense(64, 64, rngs=nnx.Rngs(0))
    with gtp.use_recipe(gtp.NVFP4()), pytest.raises(ValueError, match=naming("path gtp_jax.init exclude=()")):
        jax.eval_shape(lambda x: unnamed(x), x)
    short = gtp.init(lambda rngs: gtp.Stack(lambda rngs: gtp.Dense(64, 64, rngs=rngs), 2, rngs=rngs), nnx.Rngs(0))
    with gtp.use_recipe(gtp.NVFP4(high_precision_first=3)), pytest.raises(ValueError, match=naming("3 layers")):
        jax.eval_shape(lambda x: short(x), x)
