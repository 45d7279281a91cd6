"""Arrays and other values that modules keep as attributes, not in variables: right, or refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming

import gtp_jax as gtp
from gtp_jax.nn import abstract_model

from .test_models_on_meshes import assert_equal, scope

BATCH, LENGTH, WIDTH, LAYERS = 8, 4, 12, 2
DTYPES = dict(dtype="float64", param_dtype="float64")
MESH = dict(gtp=4, tp=2)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.mlp = gtp.MLP(WIDTH, 24, rngs=rngs, **DTYPES)
        self.scale = np.linspace(0.5, 1.0, WIDTH)
        # as many rows as there are layers: an array of the whole stack would broadcast
        self.shift = nnx.data(jax.random.normal(rngs.params(), (LAYERS, 1, 1, WIDTH), jnp.float64))
        self.key = nnx.data(jax.random.key(1))

    def __call__(self, x):
        noise = jax.random.normal(self.key, x.shape, x.dtype)
        return self.mlp(x) * self.scale + self.shift.sum(0) + 0.1 * noise


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.mlp = gtp.MLP(WIDTH, 24, rngs=rngs, **DTYPES)
        self.calls = nnx.data(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls = self.calls + 1
        return self.mlp(x) * self.calls


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = Block(rngs)
        self.count = Counting(rngs)
        self.blocks = gtp.Stack(lambda rngs: Block(rngs), LAYERS, rngs=rngs)

    def __call__(self, x):
        return self.blocks(self.count(self.first(x)))


def loss(model, batch):
    return jnp.mean(jnp.sin(model(batch["x"])))


def inputs():
    return jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH)))


def trained(degrees):
    with scope(degrees):
        optimizer = optax.sgd(0.1)
        state = gtp.TrainState.create(gtp.init(Model, nnx.Rngs(0)), optimizer)
        step = gtp.train_step(loss, optimizer, microbatches=2)
        for _ in range(2):
            state, metrics = step(state, {"x": inputs()})
        return jax.tree.map(np.asarray, (metrics, state.params, state.model_state))


@pytest.mark.full
def test_they_are_part_of_the_state_and_mean_what_they_mean_without_a_mesh(x64):
    found = trained(MESH)
    assert_equal(found, trained(None))
    assert found[2]["count"]["calls"] == 4


def test_every_layer_of_a_stack_has_its_own(x64):
    stack = nnx.jit(lambda: gtp.Stack(lambda rngs: Block(rngs), LAYERS, rngs=nnx.Rngs(0)))()
    graph, state = nnx.split(stack.layers)

    @jax.jit
    def in_a_loop(state, x):
        for layer in range(LAYERS):
            x = nnx.merge(graph, jax.tree.map(lambda a, layer=layer: a[layer], state))(x)
        return x

    found = jax.jit(lambda x: stack(x))(inputs())
    np.testing.assert_array_equal(found, in_a_loop(state, inputs()))


def test_a_layer_of_a_stack_that_writes_one_is_refused(x64):
    stack = nnx.jit(lambda: gtp.Stack(lambda rngs: Counting(rngs), LAYERS, rngs=nnx.Rngs(0)))()
    with pytest.raises(ValueError, match=naming("Counting calls nnx.Variable")):
        stack(inputs())


class Noting(nnx.Module):
    """A layer whose call does something to its attributes."""

    def __init__(self, change, rngs):
        self.dense, self.change = gtp.Dense(WIDTH, WIDTH, rngs=rngs), change
        self.inner = nnx.Dict(count=0, other=nnx.Dict())
        self.calls, self.kind, self.rate, self.seen, self.names = 3, "x", float("nan"), [], {"a": {1}}

    @functools.cached_property
    def length(self):
        return LENGTH

    def __call__(self, x):
        self.change(self)
        return self.dense(x)


class OnRanks(gtp.nn.Layer):
    """A layer written for local view that contains one."""

    def __init__(self, change, rngs):
        super().__init__()
        self.noting, self.sequence_parallel = Noting(change, rngs), False

    def local(self, x):
        return self.noting(x)


CHANGES = {
    "calls": lambda layer: setattr(layer, "calls", layer.calls + 1),
    "kind": lambda layer: delattr(layer, "kind"),
    "last": lambda layer: setattr(layer, "last", None),
    "rate": lambda layer: setattr(layer, "rate", 1.0),
    "seen": lambda layer: layer.seen.append(1),
    "names": lambda layer: layer.names["a"].add(2),
    "inner.count": lambda layer: setattr(layer.inner, "count", 0.0),
    "inner.other": lambda layer: setattr(layer.inner, "other", nnx.Dict()),
}


def leaves_them(layer):
    """Sets every attribute to what it was, and computes a property that the layer keeps."""
    layer.calls, layer.kind, layer.rate, layer.inner.count = layer.length - 1, "x", layer.rate, 0
    layer.seen, layer.names, layer.inner.other = [], {"a": {1}}, layer.inner.other


def stack_of(change):
    return lambda rngs: gtp.Stack(lambda rngs: Noting(change, rngs), LAYERS, rngs=rngs)


@pytest.mark.parametrize("degrees", [None, MESH])
@pytest.mark.parametrize("how", ["stack", "run_chain", "alone"])
def test_what_a_call_does_to_an_attribute_is_refused_by_name_where_it_would_be_lost(how, degrees):
    name, owner = ("Noting", "") if how == "stack" else ("OnRanks", "noting.")

    def trace(change):
        make = stack_of(change) if how == "stack" else functools.partial(OnRanks, change)
        call = gtp.nn.run_chain if how == "run_chain" else lambda x, model: model(x)
        with scope(degrees):
            graph, state = nnx.split(abstract_model(make))
            return jax.eval_shape(lambda state, x: call(x, nnx.merge(graph, state)), state, inputs())

    assert trace(leaves_them).shape == inputs().shape
    for path, change in CHANGES.items():
        if how == "alone" and degrees is None:  # called itself, not a copy
            assert trace(change).shape == inputs().shape
            continue
        with pytest.raises(ValueError, match=naming(f"{name} {owner}{path}, copy lost nnx.Variable")):
            trace(change)


class Traced(nnx.Module):
    def __init__(self, rngs):
        self.dense = gtp.Dense(WIDTH, WIDTH, rngs=rngs)
        self.mask = jnp.tril(jnp.ones((LENGTH, LENGTH)))


def test_one_that_flax_does_not_see_under_a_trace_is_refused_by_name():
    with pytest.raises(TypeError, match=naming("Traced inner `mask` nnx.Variable")):
        gtp.init(lambda rngs: nnx.Dict(inner=Traced(rngs)), nnx.Rngs(0))


class Contained(nnx.Module):
    def __init__(self, wrap):
        self.dense = gtp.Dense(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.masks = nnx.data([wrap(jnp.tril(jnp.ones((LENGTH, LENGTH))))])


@pytest.mark.parametrize("make", [gtp.init, lambda factory, rngs: abstract_model(factory)])
def test_one_in_a_container_is_refused_by_name_unless_a_variable_holds_it(make):
    assert make(lambda rngs: Contained(nnx.Variable), nnx.Rngs(0)).masks[0].shape == (LENGTH, LENGTH)
    with pytest.raises(TypeError, match=naming("Contained list `masks`")):
        make(lambda rngs: Contained(lambda array: array), nnx.Rngs(0))


class Reading(nnx.Module):
    def __init__(self, rngs):
        self.dense = gtp.Dense(WIDTH, WIDTH, rngs=rngs, **DTYPES)

    def __call__(self, x):
        return self.dense(x) + jnp.sum(self.dense.kernel[...] ** 2)


def test_a_weight_that_a_layer_of_a_stack_reads_is_refused(x64):
    stack = gtp.Stack(lambda rngs: Reading(rngs), LAYERS, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=naming("`Stack` Call module")):
        stack(inputs())
