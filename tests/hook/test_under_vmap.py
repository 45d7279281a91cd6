"""Under a `jax.vmap` over examples, a sharded model has the gradients of the model without a mesh.

So has a `Stack` of gtp_jax's own layers, whose examples are batches: a layer shards the first dimension of its input.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from selection import others_full

import gtp_jax as gtp

from .models import F64
from .steps import twins


def of_one_example(rngs):
    """Takes one example; its layers are called in one walk."""
    layers = [nnx.Linear(16, 16, rngs=rngs, param_dtype=jnp.float64) for _ in range(3)]
    return nnx.Sequential(*[part for layer in layers for part in (layer, jnp.tanh)])


class Penalized(nnx.Module):
    """Returns its output, and a penalty that all examples share."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        return jnp.tanh(self.linear(x)), (self.linear.kernel[...] ** 2).sum()


class WithPenalties(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Penalized(rngs) for _ in range(2)])

    def __call__(self, x):
        penalties = 0.0
        for layer in self.layers:
            x, penalty = layer(x)
            penalties += 1e-2 * penalty
        return x + penalties


class Outer(nnx.Module):
    """Maps a model within it."""

    def __init__(self, rngs):
        self.inner = of_one_example(rngs)

    def __call__(self, x):
        return jax.vmap(self.inner)(x)


CALLS = {
    "vmap": lambda model, x: jax.vmap(model)(x),
    "vmap of jit": lambda model, x: jax.vmap(jax.jit(lambda x: model(x)))(x),
    "checkpoint of vmap": lambda model, x: jax.checkpoint(jax.vmap(model))(x),
    "nnx.vmap": lambda model, x: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(model, x),
    "map in batches": lambda model, x: jax.lax.map(model, x, batch_size=4),
    "vmap of vmap": lambda model, x: jax.vmap(jax.vmap(model))(x.reshape(2, 4, 16)),
    "gradient penalty": lambda model, x: jax.vmap(jax.grad(lambda x: model(x).sum()))(x),
}
CASES = [
    *((of_one_example, nnx.Linear, call) for call in CALLS),
    *((WithPenalties, "layers.*", call) for call in ("vmap", "map in batches")),
    (Outer, nnx.Linear, "called"),
]


USUAL = [CASES[0], CASES[4], CASES[7], CASES[9]]


@pytest.mark.parametrize(
    ("make", "blocks", "call"), others_full(CASES, USUAL), ids=lambda value: getattr(value, "__name__", value)
)
def test_gradients_are_those_without_a_mesh(make, blocks, call, x64, key):
    called = CALLS.get(call, lambda model, x: model(x))

    def loss(model, x):
        return (called(model, x) ** 2).mean()

    x = jax.random.normal(key, (8, 16), jnp.float64)
    plain, model = twins(lambda: make(nnx.Rngs(0)))
    value, expected = nnx.jit(nnx.value_and_grad(loss))(plain, x)
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        model = gtp.shard(model, blocks, min_size=64)
        found_value, found = nnx.jit(nnx.value_and_grad(loss))(model, x)
    assert abs(found_value - value) < 1e-12
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_no_weight_is_copied_for_each_example(x64, key):
    x = jax.random.normal(key, (24, 16), jnp.float64)
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        model = gtp.shard(nnx.jit(of_one_example)(nnx.Rngs(0)), nnx.Linear, min_size=64)
        program = str(jax.make_jaxpr(lambda x: jax.vmap(model)(x))(x))
    assert "f64[24,16]" in program and "f64[24,16,16]" not in program


def test_what_examples_share_and_is_no_float_stays_shared():
    class Counting(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x):
            return self.linear(x), jnp.int32(7)

    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        model = gtp.shard(nnx.jit(lambda: nnx.Sequential(Counting(nnx.Rngs(0))))(), Counting, min_size=64)
        _, count = nnx.jit(lambda model, x: jax.vmap(model, out_axes=(0, None))(x))(model, jnp.ones((8, 16)))
    assert count == 7


WIDTH = 16


class Residual(nnx.Module):
    def __init__(self, own, rngs):
        dense = gtp.Dense if own else nnx.Linear
        self.dense = dense(WIDTH, WIDTH, use_bias=False, rngs=rngs, **F64)

    def __call__(self, x, bias=0.0):
        return x + jnp.tanh(self.dense(x) + bias)


class Residuals(nnx.Module):
    """Layers of gtp_jax's own in a `Stack`, or stock layers in a list, and a bias that all of them may take."""

    def __init__(self, rngs, own, biased=True, **options):
        self.bias, self.biased = nnx.Param(jnp.zeros(WIDTH, jnp.float64)), biased
        if own:
            self.blocks = gtp.Stack(lambda rngs: Residual(own, rngs), 3, rngs=rngs, **options)
        else:
            self.blocks = nnx.List([Residual(own, rngs) for _ in range(3)])

    def __call__(self, x):
        shared = [self.bias[...]] * self.biased
        if isinstance(self.blocks, gtp.Stack):
            return self.blocks(x, *shared)
        for block in self.blocks:
            x = block(x, *shared)
        return x


KINDS = {
    "stack": dict(own=True, biased=False),  # whose layers share a `shard_map`
    "looped stack with a bias": dict(own=True, schedule=gtp.nn.Schedule(unroll=1)),
    "stock blocks with a bias": dict(own=False),
}


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape) / 4


def kernels_and_bias():
    return drawn(0, 3, WIDTH, WIDTH), drawn(1, WIDTH)


def examples():
    """Four examples, along dimension 1, each a batch of eight."""
    return drawn(2, 8, 4, WIDTH)


def filled(kind):
    """A sharded model of drawn values, none of which a program makes."""
    make, own = functools.partial(Residuals, **KINDS[kind]), KINDS[kind]["own"]
    model = gtp.nn.abstract_model(make) if own else nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    kernels, bias = kernels_and_bias()
    of_layers = iter(kernels)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        like = variable.get_raw_value()
        values = bias if "bias" in path else next(of_layers) if like.ndim == 2 else kernels
        variable.set_raw_value(jax.device_put(values, like.sharding if own else None))
    return model if own else gtp.shard(model, "blocks.*", min_size=64)


def plain(params, x, biased):
    kernels, bias = params
    for kernel in kernels:
        x = x + jnp.tanh(x @ kernel + bias * biased)
    return x


def assert_same(found, wanted, layers=0):
    """Compares gradients of a model with those of its bias and of its kernels, stacked along the dimension `layers`."""
    kernels, biases = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        (biases if "bias" in jax.tree_util.keystr(path) else kernels).append(np.asarray(leaf))
    kernels = np.stack(kernels, layers) if len(kernels) > 1 else kernels[0]  # a `Stack` has one array
    for one, other in zip((kernels, *biases), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * max(1, np.abs(other).max()))


@pytest.mark.parametrize("kind", others_full(KINDS, list(KINDS)[1:]))
def test_gradients_of_a_map_and_maps_of_gradients_are_those_of_one_device(kind, x64):
    def both(call, params, x):
        of_one = jax.grad(lambda params, x: (call(params, x) ** 2).sum(), (0, 1))
        of_map = jax.grad(lambda params: (jax.vmap(call, (None, 1))(params, x) ** 2).sum())
        return of_map(params), jax.vmap(of_one, (None, 1))(params, x)

    x, params = examples(), kernels_and_bias()
    call = functools.partial(plain, biased=KINDS[kind].get("biased", True))
    wanted, (wanted_by_example, wanted_slopes) = jax.jit(functools.partial(both, call))(params, x)
    with jax.set_mesh(gtp.make_mesh(dp=2, gtp=4)):
        graph, state = nnx.split(filled(kind))
        call = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
        found, (by_example, slopes) = jax.jit(functools.partial(both, call))(state, x)
    assert_same(found, wanted)
    assert_same(by_example, wanted_by_example, layers=1)
    np.testing.assert_allclose(slopes, wanted_slopes, rtol=0, atol=1e-12)


VIEWS = [(kind, view) for view in ("local", "global") for kind in KINDS]


@pytest.mark.parametrize(("kind", "view"), others_full(VIEWS, [VIEWS[0], VIEWS[2]]))
def test_a_loss_that_maps_a_model_and_its_gradients_has_the_gradients_of_one_device(kind, view, x64):
    def loss(call, x):
        slopes = jax.vmap(jax.grad(lambda x: (call(x) ** 2).sum()), 1)(x)
        return (jax.vmap(call, 1)(x) ** 2).sum() + (slopes**2).sum()

    x, params = examples(), kernels_and_bias()
    call = functools.partial(plain, biased=KINDS[kind].get("biased", True))
    wanted = jax.jit(jax.grad(lambda params: loss(functools.partial(call, params), x) / len(x)))(params)
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        state = gtp.TrainState.create(filled(kind), optax.identity())
        summed = lambda model, x: (loss(model, x), jnp.float64(len(x)))  # noqa: E731
        run = jax.jit(lambda state, x: gtp.train.loss_and_gradients(summed, state, x, view=view)[1])
        assert_same(run(state, x), wanted)
