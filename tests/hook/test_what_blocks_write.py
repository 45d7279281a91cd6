"""A block's code runs once per call, in its caller's contexts, and its writes take effect."""

import contextvars

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import gtp_jax as gtp

from .models import F64, WIDTH
from .steps import MESHES, assert_equal, scope, together, train, twins

SCALE = contextvars.ContextVar("scale", default=1.0)


class Block(nnx.Module):
    """Batch statistics, dropout of an argument's keys, sown values, a counter, an attribute, and a cached input."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs, momentum=0.9, **F64)
        self.dropout = nnx.Dropout(0.2)
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))
        self.cache = nnx.Cache(jnp.zeros((8, WIDTH), jnp.float64))
        self.calls = 0

    def __call__(self, x, rngs, memory):
        self.calls += 1
        self.count[...] += 1
        self.cache[...] = x
        memory.last[...] = memory.last[...] + x.sum()
        y = self.norm(jnp.tanh(SCALE.get() * self.dense(x)))
        self.sow(nnx.Intermediate, "seen", y.mean())
        return x + self.dropout(y, rngs=rngs), {"name": "block", "norm": (y**2).mean()}


class Memory(nnx.Module):
    def __init__(self):
        self.last = nnx.Variable(jnp.zeros((), jnp.float64))


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.rngs, self.memory = rngs, Memory()

    def __call__(self, x):
        total = 0
        for block in self.blocks:
            x, found = block(x, self.rngs, self.memory)
            assert found["name"] == "block"
            total = total + found["norm"]
        return x, total + self.memory.last[...] / 100


def loss(model, x):
    mark = SCALE.set(2.0)
    try:
        y, extra = model(x)
    finally:
        SCALE.reset(mark)
    return (y**2).mean() + extra


def test_variables_attributes_and_new_variables_are_written_as_without_a_mesh(x64):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, WIDTH)))
    found, wanted = together(Model, loss, x, MESHES["gtp 8"], steps=2, stay=False)
    assert_equal(found, wanted)
    assert any("seen" in name for name in found) and any("count" in name for name in found)


def test_a_block_runs_once_per_call(x64):
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(nnx.jit(Model)(), min_size=64)
        nnx.jit(nnx.grad(loss))(model, jnp.ones((8, WIDTH)))
        assert [block.calls for block in model.blocks] == [1, 1]


class Normed(nnx.Module):
    """A layer whose weight norm sets its parameter in each call."""

    def __init__(self, rngs):
        self.normed = nnx.WeightNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64), rngs=rngs, use_scale=False)

    def __call__(self, x):
        return x + jnp.tanh(self.normed(x))


def test_weights_that_a_block_sets_stay_shards(x64):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, WIDTH)))
    of = lambda model, x: jnp.sin(3 * model(x)).mean()  # noqa: E731
    make = lambda: nnx.Sequential(*[Normed(nnx.Rngs(i)) for i in range(2)])  # noqa: E731
    assert_equal(*together(make, of, x, MESHES["gtp 8"], blocks=Normed))
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(make(), Normed, min_size=64)
        train(model, of, x, steps=1)
        kernel = model.layers[0].normed.layer_instance.kernel.get_value()
        assert kernel.addressable_shards[0].data.size == kernel.size // 8


class Mixed(nnx.Module):
    """One weight for two uses, a weight of three dimensions, a scalar argument and a static one."""

    def __init__(self, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, 2, WIDTH), jnp.float64) / 4)

    def __call__(self, x, scale=0.5, flip=True):
        weight = self.table.sum(1) / jnp.linalg.norm(self.table[...])  # computed from the weight alone
        y = x @ weight * scale
        return jnp.flip(y, -1) @ weight.T if flip else jnp.tanh(y)


class TwoMixed(nnx.Sequential):
    def __init__(self, rngs):
        super().__init__(*[Mixed(rngs) for _ in range(2)])

    def __call__(self, x):
        return self.layers[1](self.layers[0](x), jnp.asarray(2.0), False)


def test_what_is_computed_from_weights_alone_is_differentiated(x64):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, WIDTH)))
    of = lambda model, x: jnp.sin(3 * model(x)).mean()  # noqa: E731
    make = lambda: TwoMixed(nnx.Rngs(0))  # noqa: E731
    for remat in ("matmuls", "everything"):
        assert_equal(*together(make, of, x, MESHES["dp 2, gtp 4"], blocks=Mixed, remat=remat))


class Sharing(nnx.Module):
    """Returns and keeps a new module twice, and a variable and a module that share with it."""

    def __init__(self):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0), **F64)
        self.kept, self.also = Memory(), nnx.data([Memory()])

    def __call__(self, x):
        own, other = Memory(), Memory()
        other.last = own.last
        self.kept, self.also = own, nnx.data([other])
        return self.dense(x), {"own": own, "again": own, "other": other, "last": own.last}


def test_what_new_nodes_share_when_a_block_returns_them_they_share_afterwards(x64):
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(nnx.List([Sharing()]), "0", min_size=64)

        @nnx.jit
        def both(model, x):
            _, found = model[0](x)
            assert found["own"] is found["again"] and found["other"].last is found["last"] is found["own"].last
            assert model[0].kept is found["own"] and model[0].also[0] is found["other"]
            found["own"].last[...] = x.sum()
            return found["other"].last[...]

        x = jnp.ones((8, WIDTH))
        assert both(model, x) == x.sum()


class Sowing(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        y = jnp.tanh(self.linear(x))
        self.sow(nnx.Intermediate, "mean", y.mean())
        return y


class Outer(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([Sowing(nnx.Rngs(i)) for i in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        self.sow(nnx.Intermediate, "greatest", x.max())
        return x


def test_what_a_model_and_its_blocks_sow_is_captured():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, WIDTH)), jnp.float32)
    run = nnx.jit(lambda model, x: nnx.capture(model, nnx.Intermediate)(x)[1])
    plain, model = twins(Outer)
    wanted = run(plain, x)
    with scope(MESHES["gtp 8"]):
        found = run(gtp.shard(model, "blocks.*", min_size=64), x)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
