"""`gtp.nn.lora` on stock layers that `gtp.shard` has sharded: what it computes, and in which order it is called."""

from typing import Any

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

WIDTH, VOCAB, LENGTH = 16, 48, 6
F64: Any = dict(param_dtype=jnp.float64, dtype=jnp.float64)


class Block(nnx.Module):
    """A block of a feedforward layer, the first one of attention as well."""

    def __init__(self, rngs, first):
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs, **F64) if first else None
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs, **F64)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs, **F64)

    def __call__(self, x):
        x = x if self.attention is None else x + self.attention(x)
        return x + self.down(jnp.tanh(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs, **F64)
        self.layers = nnx.List([Block(rngs, first=i == 0) for i in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs, **F64)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model, batch):
    return gtp.cross_entropy(model(batch["tokens"]), batch["targets"])


def batch_of():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (8, LENGTH + 1)).astype(np.int32)
    return {"tokens": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}


def adapted(model) -> Any:
    return gtp.nn.lora(model, 2, 6, rngs=nnx.Rngs(1))


@nnx.jit
def drawn(rngs):
    return adapted(Model(rngs))


def sharded():
    return gtp.init(lambda rngs: adapted(gtp.shard(Model(rngs), "layers.*", min_size=64)), nnx.Rngs(0))


def trained(model, optimizer, steps=2):
    state = gtp.TrainState.create(model, optimizer)
    step = gtp.train_step(loss, optimizer)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch_of())
        losses.append(float(metrics["loss"]))
    return losses, jax.tree.map(np.asarray, state.params), state


def test_steps_are_those_of_one_device_and_of_merged_kernels(x64):
    optimizer = optax.sgd(0.5)
    wanted, params, state = trained(drawn(nnx.Rngs(0)), optimizer)
    assert wanted[1] < wanted[0]
    assert set(params["layers"]["0"]["attention"]) == {"query", "key", "value", "out"} and set(params) == {"layers"}
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        found, others, _ = trained(sharded(), optimizer)
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    for one, other in zip(jax.tree.leaves(others), jax.tree.leaves(params), strict=True):
        # JAX's attention, which Flax's layer calls, has its softmax in float32
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * np.abs(other).max())

    plain, call = nnx.jit(Model)(nnx.Rngs(0)), nnx.jit(lambda model, tokens: model(tokens))
    total, count = nnx.jit(loss)(plain, batch_of())
    np.testing.assert_allclose(wanted[0], total / count, rtol=1e-13)  # `b` begins as zeros
    for number, layer in enumerate(plain.layers):
        own = params["layers"][str(number)]
        merged = {path: (getattr(layer, path), own[path]) for path in ("up", "down")}
        merged |= {name: (getattr(layer.attention, name), one) for name, one in own.get("attention", {}).items()}
        for projection, one in merged.values():
            kernel = np.asarray(projection.kernel[...])
            product = 3 * one["adapter"]["a"] @ one["adapter"]["b"]
            projection.kernel.set_value(jnp.asarray(kernel + product.reshape(kernel.shape)))
    model, tokens = state.model_def.model(state.params, state.model_state, state.frozen), batch_of()["tokens"]
    np.testing.assert_allclose(call(model, tokens), call(plain, tokens), rtol=0, atol=1e-6)


@pytest.mark.full
def test_the_base_stays_sharded_and_has_no_gradient(x64):
    optimizer = optax.sgd(0.1)
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        state = gtp.TrainState.create(sharded(), optimizer)
        kernel = state.frozen["layers"]["0"]["up"]["base"]["kernel"]
        assert kernel.addressable_shards[0].data.size * 8 == kernel.size
        step = gtp.train_step(loss, optimizer)
        found = hlo.collectives(step.lower(state, batch_of()).compile().as_text())  # pyright: ignore[reportFunctionMemberAccess]
    assert not [c for c in found if c.kind == "reduce-scatter"] and [c for c in found if c.kind == "all-gather"]
    adapters = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state.params))
    reduced = sum(c.operand_bytes * c.times for c in found if c.kind == "all-reduce" and c.group == 8)
    assert adapters <= reduced <= adapters + 64


class Shared(nnx.Module):
    def __init__(self, rngs):
        self.one = nnx.Linear(8, 8, rngs=rngs)
        self.other = self.one


shared = nnx.jit(Shared)


class Scanned(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs))(rngs.fork(split=2))


class Mixed(nnx.Module):
    def __init__(self, rngs):
        self.first = gtp.Dense(8, 8, rngs=rngs)
        self.second = nnx.Linear(8, 8, rngs=rngs)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (shared, {}, "one also other"),
        (shared, dict(targets=["one"]), "`targets` 'one' also other"),
        (shared, dict(targets=["other"]), "`targets` 'other' also one"),
        (nnx.jit(Scanned), {}, "layers nnx.Linear (2, 8, 8) `Stack`"),
        (nnx.jit(lambda rngs: nnx.Linear(8, 8, rngs=rngs)), {}, "Linear no layer"),
        (drawn, {}, "layers.0.attention.key already"),
        (Mixed, dict(recipe=gtp.FP8()), "`recipe` FP8 second Flax"),
    ],
)
def test_what_is_no_projection_of_its_own_is_refused(make, options, message):
    with pytest.raises(ValueError, match=naming(message)):
        gtp.nn.lora(make(nnx.Rngs(0)), 2, 4, rngs=nnx.Rngs(0), **options)


class Tuned(nnx.Module):
    def __init__(self, rngs):
        self.own = gtp.Dense(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.adapter = nnx.LoRA(WIDTH, 2, WIDTH, rngs=rngs)


@pytest.mark.parametrize("recipe", [gtp.FP8(), gtp.recipes.BF16(override={"layers.1": gtp.FP8()})])
def test_a_recipe_that_quantizes_a_sharded_weight_is_refused_where_it_is_frozen(recipe):
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        model = gtp.shard(nnx.jit(Tuned)(nnx.Rngs(0)), min_size=WIDTH * WIDTH)
        with pytest.raises(ValueError, match=naming("`recipe` quantizes `gtp_jax.shard`")):
            gtp.nn.freeze(model, recipe)
        frozen = gtp.nn.freeze(model, gtp.FP8(exclude=("layers",)))
        assert isinstance(frozen.own.kernel.get_value(), gtp.formats.QuantizedArray)
        assert frozen.layers[0].kernel.get_value().dtype == jnp.float32
        kept = gtp.nn.freeze(model, recipe, trained=nnx.Any(nnx.LoRAParam, nnx.PathContains("layers")))
        assert isinstance(kept.layers[1].kernel, nnx.Param)


class OnlyProjections(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])


@pytest.mark.parametrize("make", others_full([OnlyProjections, Model], [OnlyProjections]))
def test_sharding_behind_adapters_is_refused(make):
    named = naming("frozen `gtp_jax.nn.lora` `gtp_jax.nn.freeze` `gtp_jax.shard` first")
    with jax.set_mesh(gtp.make_mesh(gtp=8)), pytest.raises(ValueError, match=named):
        gtp.shard(adapted(make(nnx.Rngs(0))), "layers.*", min_size=64)


def test_frozen_parameters_of_own_layers_are_left_to_these_layers():
    class Around(nnx.Module):
        def __init__(self, rngs):
            self.own = gtp.nn.lora(gtp.nn.LayerNormDense(WIDTH, WIDTH, rngs=rngs), 2, 4, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        model = gtp.shard(nnx.jit(Around)(nnx.Rngs(0)), min_size=WIDTH)  # the size of the frozen scale
        assert not isinstance(model.own.scale, nnx.Param)
        assert model.layers[0].kernel.get_raw_value().sharding.spec[0] == "gtp"
