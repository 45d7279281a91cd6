"""Local and global view compute the same: what is decided in one about quantized weights holds in the other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.models.llama import LlamaBlock

SIZES = dict(  # a table of no more rows than tokens is gathered in both views; see `Embed`
    vocab_size=64, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96
)
CONFIG = LlamaConfig(**SIZES, dtype="float64")
RECIPES = {
    "none": None,
    "NVFP4, ends in high precision": gtp.NVFP4(high_precision_first=1, high_precision_last=1),
    "MXFP8 matmuls": gtp.MXFP8(matmuls=True),
    "FP8 matmuls": gtp.FP8(matmuls=True),
}


class UserBlock(nnx.Module):
    """A Llama's block as a user writes it: not for local view."""

    def __init__(self, config, *, rngs):
        block = LlamaBlock(config, rngs=rngs)
        self.attention, self.mlp = block.attention, block.mlp

    def __call__(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


def llama(block, rngs):
    model = Llama(CONFIG, rngs=rngs)
    make = lambda rngs: block(CONFIG, rngs=rngs)  # noqa: E731
    model.blocks = gtp.Stack(make, CONFIG.num_layers, schedule=CONFIG.schedule, rngs=nnx.Rngs(1))
    return model


def computed(block, view, recipe, degrees, **options):
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (16, 9)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    with jax.set_mesh(gtp.make_mesh(**degrees)):
        state = gtp.TrainState.create(gtp.init(lambda rngs: llama(block, rngs), nnx.Rngs(0)), optax.sgd(1.0))
        run = jax.jit(
            lambda state, batch: gtp.train.loss_and_gradients(
                next_token_loss, state, batch, view=view, recipe=recipe, microbatches=2, **options
            )
        )
        compiled = run.lower(state, batch).compile()
        found = [c for c in hlo.collectives(compiled.as_text()) if c.axes == ("gtp",)]
        gathers = sum(c.times for c in found if c.kind == "all-gather")
        return jax.tree.map(np.asarray, compiled(state, batch)), gathers


@pytest.mark.slow
@pytest.mark.parametrize("block", [LlamaBlock, UserBlock])
@pytest.mark.parametrize(
    "name, degrees, options",
    [
        ("none", dict(dp=2, gtp=2, tp=2), {}),
        ("NVFP4, ends in high precision", dict(gtp=4, tp=2), {}),
        ("NVFP4, ends in high precision", dict(gtp=4, tp=2), dict(pregathered_layers=1)),
        ("MXFP8 matmuls", dict(dp=2, gtp=2, tp=2), {}),
        ("FP8 matmuls", dict(gtp=8), dict(pregathered_layers="all")),
    ],
)
def test_both_views_have_the_same_gradients_and_gather_as_often(block, name, degrees, options, x64):
    recipe = RECIPES[name]
    (wanted_loss, wanted), once = computed(LlamaBlock, "local", recipe, degrees, **options)
    (loss, found), times = computed(block, "global", recipe, degrees, **options)
    assert times == once
    assert abs(loss - wanted_loss) <= 1e-12 * abs(wanted_loss)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        # a sum in another order may round to another code here and there where operands are quantized
        tolerance = 1e-12 if recipe is None or "matmuls" not in name else 1e-2
        np.testing.assert_allclose(
            one, other, rtol=0, atol=tolerance * np.abs(other).max(), err_msg=jax.tree_util.keystr(path)
        )


def test_check_names_the_first_tensor_that_differs():
    class Wrong(gtp.nn.Layer):
        """Takes the mean of a rank's own part of the batch."""

        def __init__(self, rngs):
            super().__init__()
            self.sequence_parallel = False
            self.dense = gtp.Dense(8, 8, dtype="float32", rngs=rngs)

        def local(self, x):
            return self.dense(x) * x.mean()

    class Model(nnx.Module):
        def __init__(self, layer, rngs):
            self.layer = layer(rngs)

        def __call__(self, x):
            return self.layer(x)

    right = lambda rngs: Model(lambda rngs: gtp.Dense(8, 8, dtype="float32", rngs=rngs), rngs)  # noqa: E731
    wrong = lambda rngs: Model(Wrong, rngs)  # noqa: E731
    loss = lambda model, x: (model(x) ** 2).mean()  # noqa: E731
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        errors = gtp.train.check(loss, right, x, microbatches=2)
        assert errors.keys() == {"loss", "gradient layer.kernel"} and max(errors.values()) < 1e-6
        on_mesh = jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), jax.P("gtp")))
        assert gtp.train.check(loss, right, on_mesh, microbatches=2) == errors
        narrow = lambda rngs: gtp.Dense(8, 8, dtype="bfloat16", param_dtype="bfloat16", rngs=rngs)  # noqa: E731
        assert gtp.train.check(loss, narrow, x, tolerance=0.03)["gradient kernel"] < 0.03
        with pytest.raises(ValueError, match=naming("loss dp 1 gtp 4 tp 2")):
            gtp.train.check(loss, wrong, x)
        with pytest.raises(ValueError, match=naming("loss nan")):
            gtp.train.check(lambda model, x: loss(model, x) * jnp.nan, right, x)
    with pytest.raises(ValueError, match=naming("compares set_mesh")):
        gtp.train.check(loss, right, x)


BESIDE_THE_LOSS = {  # as a function of the degree, and by how much it differs
    "finite": (lambda degree: jnp.asarray([-jnp.inf, degree]), 3.0),
    "rounded": (lambda degree: jnp.asarray([-jnp.inf, 1.0 + 1e-6 * degree]), 3e-6),
    "too large": (lambda degree: jnp.asarray([1.0, jnp.inf if degree > 1 else 3e38]), np.inf),
    "sign": (lambda degree: jnp.asarray([1.0, jnp.inf if degree > 1 else -jnp.inf]), np.inf),
    "nan": (lambda degree: jnp.asarray([1.0, jnp.inf if degree > 1 else jnp.nan]), np.inf),
    "complex": (lambda degree: jnp.asarray([2.0 + 1j, jnp.inf + degree * 1j]), 1.5),
    "complex rounded": (lambda degree: jnp.asarray([2.0 + 1e-6j * degree]), 1.5e-6),
}


@pytest.mark.parametrize("name", others_full(BESIDE_THE_LOSS, ["rounded", "nan"]))
def test_check_compares_finite_numbers_next_to_those_that_are_not(name):
    of_degree, difference = BESIDE_THE_LOSS[name]

    def loss(model, x):
        return (model(x) ** 2).mean(), of_degree(jax.sharding.get_abstract_mesh().shape["gtp"])

    def checked(tolerance):
        factory = lambda rngs: gtp.Dense(8, 8, dtype="float32", rngs=rngs)  # noqa: E731
        return gtp.train.check(loss, factory, np.ones((8, 8), np.float32), has_aux=True, tolerance=tolerance)

    with jax.set_mesh(gtp.make_mesh(gtp=4, devices=jax.devices()[:4])):
        with pytest.raises(ValueError, match=naming("aux dp 1 gtp 4")):
            checked(difference / 2 if np.isfinite(difference) else 1e300)
        if np.isfinite(difference):
            assert abs(checked(2 * difference)["aux "] - difference) < 0.1 * difference


def test_check_uses_a_recipe_on_the_mesh_and_on_one_device():
    codes = []

    def loss(model, x):
        codes.append([one.wire.format.name for one in model.prepared])
        return jnp.mean(jax.grad(lambda x: jnp.sum(jnp.tanh(model(x))))(x) ** 2)

    x = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
    with jax.set_mesh(gtp.make_mesh(gtp=4, devices=jax.devices()[:4])):
        found = gtp.train.check(loss, lambda rngs: gtp.Dense(32, 32, dtype="float32", rngs=rngs), x, recipe=gtp.FP8())
        with gtp.use_recipe(gtp.FP8()):
            assert gtp.train.check(loss, lambda rngs: gtp.Dense(32, 32, dtype="float32", rngs=rngs), x) == found
        with pytest.raises(TypeError, match=naming("recipe")):
            gtp.train.check(loss, lambda rngs: gtp.Dense(32, 32, rngs=rngs), x, recipe="fp8")
    assert max(found.values()) < 1e-6 and len(codes) >= 2 and set(map(tuple, codes)) == {("FP8_E4M3",)}
