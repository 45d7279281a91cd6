"""Stock layers in their own dtypes, with adapters, and together with gtp_jax's layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp

from .models import F64, GPT2, WIDTH, mean_of, tokens
from .steps import MESHES, scope, together, twins


class Block(nnx.Module):
    def __init__(self, rngs, **dtype):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs, **dtype)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs, **dtype)
        self.conv = nnx.Conv(WIDTH, WIDTH, (3,), rngs=rngs, **dtype)
        self.mix = nnx.Einsum("bsi,io->bso", (WIDTH, WIDTH), (WIDTH,), rngs=rngs, **dtype)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.mix(jnp.tanh(self.conv(x)))


class Model(nnx.Module):
    def __init__(self, **dtype):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(32, WIDTH, rngs=rngs, **dtype)
        self.layer_0, self.layer_1 = (Block(rngs, **dtype) for _ in range(2))
        self.head = nnx.Linear(WIDTH, 32, rngs=rngs, **dtype)

    def __call__(self, tokens):
        x, mask = self.embed(tokens), nnx.make_causal_mask(tokens)
        for block in (self.layer_0, self.layer_1):
            x = block(x, mask)
        return self.head(x)


def loss(model, tokens):
    return gtp.cross_entropy(model(tokens), jnp.roll(tokens, 1, axis=1))[0].astype(jnp.float32)


@pytest.mark.parametrize(
    "dtype, tolerance", [({}, 2e-6), pytest.param(dict(dtype=jnp.bfloat16), 3e-2, marks=pytest.mark.full)]
)
def test_steps_in_the_layers_own_dtypes_are_those_without_a_mesh(dtype, tolerance):
    found, wanted = together(lambda: Model(**dtype), loss, tokens(), MESHES["gtp 8"], steps=1)
    first = [name for name in wanted if name.startswith("first")]
    # the gradient of the keys' bias is zero except for rounding
    size = max(float(np.abs(wanted[name]).max()) for name in first if "gradient" in name)
    for name in first:
        bound = tolerance * (size if "gradient" in name else abs(float(wanted[name])))
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=bound, err_msg=name)


class Own(nnx.Module):
    """A block with a stock layer, a layer of gtp_jax, and a weight that shards itself."""

    def __init__(self, rngs):
        self.own = gtp.Dense(WIDTH, WIDTH, dtype="float64", param_dtype="float64", rngs=rngs)
        self.flax = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64)
        self.param = gtp.Param(jnp.linspace(0.5, 1.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH) / WIDTH)

    def __call__(self, x):
        return x + jnp.tanh(self.flax(jnp.sin(self.own(x)))) @ self.param.gather()


@pytest.mark.filterwarnings("ignore:no mesh is in scope")
def test_layers_and_parameters_of_gtp_jax_within_blocks_gather_their_own_weights(x64):
    x = np.random.default_rng(0).normal(size=(8, WIDTH))

    def losses(shard, view="global"):
        mean = lambda model, x: (jnp.sin(3 * model(x)).sum(), jnp.float64(x.size))  # noqa: E731
        blocks = lambda rngs: nnx.Sequential(*[Own(rngs) for _ in range(2)])  # noqa: E731
        state = gtp.TrainState.create(gtp.init(lambda rngs: shard(blocks(rngs)), nnx.Rngs(0)), optax.sgd(0.5))
        step, found = gtp.train_step(mean, optax.sgd(0.5), view=view), []
        for _ in range(3):
            state, metrics = step(state, x)
            found.append(float(metrics["loss"]))
        return found

    wanted = losses(lambda model: model)
    with scope(MESHES["dp 2, gtp 4"]):
        for view in ("global", "local"):
            found = losses(lambda model: gtp.shard(model, Own, min_size=64), view)
            np.testing.assert_allclose(found, wanted, rtol=1e-12)


def gpt2():
    return GPT2(nnx.Rngs(0, dropout=1), depth=2)


def assert_leaves_close(found, wanted):
    """Compares arrays alone: metadata of sharded variables say how they are sharded."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)


def with_adapters(model, rngs):
    for block in model.blocks:
        block.up = nnx.LoRA(
            WIDTH, 2, 4 * WIDTH, base_module=block.up, b_initializer=nnx.initializers.normal(0.3), rngs=rngs, **F64
        )
    return model


@nnx.jit
def of_adapters(model, tokens):
    return nnx.value_and_grad(mean_of("plain"), argnums=nnx.DiffState(0, nnx.LoRAParam))(model, tokens)


@pytest.mark.full
@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_may_be_added_before_sharding_or_after(when, x64):
    plain = with_adapters(gpt2(), nnx.Rngs(5))
    wanted = of_adapters(plain, tokens())
    with scope(MESHES["gtp 8"]):
        model = gpt2()
        if when == "before":
            model = gtp.shard(with_adapters(model, nnx.Rngs(5)), "blocks.*", min_size=64)
        else:
            model = with_adapters(gtp.shard(model, "blocks.*", min_size=64), nnx.Rngs(5))
        found = of_adapters(model, tokens())
    assert_leaves_close(found, wanted)
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(wanted[1])) > 1e-3


class Adapted(nnx.Module):
    """A layer with an adapter whose variables copy the metadata of the layer's weight, as qwix has it."""

    def __init__(self, base, rngs):
        self.base = base
        own = base.kernel.get_metadata()
        for name, shape in (("a", (WIDTH, 2)), ("b", (2, 3 * WIDTH))):
            value = jax.random.normal(rngs(), shape, jnp.float64)
            setattr(self, name, nnx.LoRAParam(value, **{**own, "out_sharding": None}))

    def __call__(self, x):
        y = self.base(x)
        return y + (x @ self.a @ self.b).reshape(y.shape)


@pytest.mark.full
def test_an_adapter_may_copy_the_metadata_of_a_weight_of_another_shape(x64):
    def adapted(model):
        for block in model.blocks:
            block.attention.qkv = Adapted(block.attention.qkv, nnx.Rngs(5))
        return model

    plain, other = twins(gpt2)
    wanted = of_adapters(adapted(plain), tokens())
    with scope(MESHES["gtp 8"]):
        model = adapted(gtp.shard(other, "blocks.*", min_size=64))
        found = of_adapters(model, tokens())
        assert "placement" in model.blocks[0].attention.qkv.a.get_metadata()
    assert_leaves_close(found, wanted)
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(wanted[1])) > 1e-3
