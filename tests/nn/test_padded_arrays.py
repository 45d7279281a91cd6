"""Weights of any shape that gtp does not divide are stored padded, and train as on one device."""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from padded_states import padding_of, same

import gtp_jax as gtp
from gtp_jax.layout import layout_of_array

from .test_padded import on

normal = nnx.initializers.normal(1.0)


class Arrays(nnx.Module):
    """Arrays of 4, 3, 2 and 1 dimensions; 7 divides none of these, and 3 few."""

    def __init__(self, rngs, tensor_dim=None):
        def make(*shape, **options):
            return gtp.Param(normal(rngs.params(), shape, jnp.float64), **options)

        self.four, self.two = make(4, 10, 5, 16, tensor_dim=tensor_dim), make(20, 16)
        self.one, self.odd = make(50), make(10, 5, 8)

    def __call__(self, x):
        y = jnp.einsum("bi,jikl->bl", x, self.four.gather()) + self.one.gather()[:16]
        z = jnp.einsum("bi,ijk->bk", x, self.odd.gather()) + self.two.gather()[3, :8]
        return jnp.tanh(y[:, :10] + jnp.sum(z, -1, keepdims=True))


class Reading(Arrays):
    """Reads elements of arrays, instead of gathering them."""

    def __call__(self, x):
        return super().__call__(x) * self.two[3, :10] + jnp.sum(2 * self.one)


class Layers(nnx.Module):
    """A convolution and an einsum, alone and in a stack."""

    def __init__(self, rngs):
        options = dict(dtype=jnp.float64, param_dtype=jnp.float64, rngs=rngs)
        self.conv = gtp.nn.Conv(10, 10, 3, **options)
        self.einsum = gtp.nn.Einsum("bte,ehd->bthd", (10, 2, 5), **options)
        self.stack = gtp.Stack(lambda rngs: gtp.nn.Conv(10, 10, 3, **{**options, "rngs": rngs}), 2, rngs=rngs)

    def __call__(self, x):
        x = jnp.broadcast_to(x[:, None], (len(x), 4, 10))
        x = self.stack(jnp.sin(self.conv(x)))
        return jnp.sin(jnp.reshape(self.einsum(x), (len(x), 4, 10)))


class Stacked(nnx.Module):
    def __init__(self, rngs, tensor_dim=None):
        self.stack = gtp.Stack(lambda rngs: Arrays(rngs, tensor_dim), 2, rngs=rngs)

    def __call__(self, x):
        return self.stack(x)


def loss(model, x):
    return jnp.sum(jnp.sin(model(x))), x.shape[0]


CASES = {
    # a model, the degrees of the mesh, the view
    "arrays whose elements are read, gtp 7": (Reading, dict(gtp=7), "global"),
    "arrays, gtp 7, local": (Arrays, dict(gtp=7), "local"),
    "stacked, gtp 7": (Stacked, dict(gtp=7), "local"),
    "layers, gtp 7, global": (Layers, dict(gtp=7), "global"),
    "stacked, gtp 3 x dp 2": (Stacked, dict(gtp=3, dp=2), "global"),
    "stacked, gtp 3 x tp 2, tp shards 5": (functools.partial(Stacked, tensor_dim=2), dict(gtp=3, tp=2), "global"),
}


@functools.cache
def trained(model, view="global", **degrees):
    """The logical parameters and the losses of two steps."""
    optimizer, devices = optax.adamw(1e-2), jax.devices()[: math.prod(degrees.values())]
    x = jax.random.normal(jax.random.key(1), (2, 42, 10), jnp.float64)
    with jax.set_mesh(gtp.make_mesh(**{"gtp": 1, **degrees}, devices=devices)), gtp.layout.even_shares():
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "a weight of shape .* stays whole")
            state = gtp.TrainState.create(gtp.init(model, nnx.Rngs(0)), optimizer)
        step, losses = gtp.train_step(loss, optimizer, view=view), []
        for rows in x:
            state, metrics = step(state, rows)
            losses.append(float(metrics["loss"]))
        assert not padding_of(state).any() and bool(state.model_def.padded) == bool(degrees)
        return jax.tree.map(np.asarray, state.logical().params), losses


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_steps_with_padded_arrays_are_those_of_one_device(case, x64):
    model, degrees, view = CASES[case]
    plain = model.func if isinstance(model, functools.partial) else model
    (wanted, losses), (found, own) = trained(plain), trained(model, view, **degrees)
    np.testing.assert_allclose(own, losses, rtol=1e-11)
    same(found, wanted, atol=1e-11)


@pytest.mark.parametrize(
    ("degrees", "shape", "tensor_dim", "stored", "spec"),
    [
        (dict(gtp=4, tp=2), (3, 8, 5, 16), None, (3, 8, 5, 16), (None, None, None, "gtp")),
        (dict(gtp=4, tp=2), (3, 8, 5, 16), 1, (3, 8, 5, 16), (None, "tp", None, "gtp")),
        (dict(gtp=4, tp=2), (3, 5, 16), 2, (3, 5, 16), (None, None, ("tp", "gtp"))),
        (dict(gtp=7), (4, 10, 5, 16), None, (4, 10, 5, 21), (None, None, None, "gtp")),
        (dict(gtp=7), (20, 16), None, (21, 16), ("gtp", None)),
        (dict(gtp=3, tp=2), (4, 10, 5, 16), 1, (4, 10, 5, 18), (None, "tp", None, "gtp")),
        (dict(gtp=2, tp=3), (5, 7), 0, (6, 7), (("tp", "gtp"), None)),
        (dict(gtp=7), (1, 13), None, (1, 14), (None, "gtp")),
    ],
)
def test_the_longest_dimension_that_is_divided_or_needs_least_padding_is_sharded(
    degrees, shape, tensor_dim, stored, spec
):
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])):
        with gtp.layout.even_shares():
            layout = layout_of_array(shape, tensor_dim=tensor_dim)
    assert (layout.shape, layout.array_shape, layout.spec) == (shape, stored, PartitionSpec(*spec))


@pytest.mark.full
def test_a_frozen_array_stays_padded(x64):
    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.arrays = Stacked(rngs)
            self.adapter = nnx.LoRAParam(jnp.ones(10))

        def __call__(self, x):
            return self.arrays(x) * self.adapter[...]

    x = jax.random.normal(jax.random.key(1), (42, 10), jnp.float64)
    found = []
    for degree in (1, 7):
        with on(degree):
            model = gtp.nn.freeze(gtp.init(Adapted, nnx.Rngs(0)))
            state = gtp.TrainState.create(model, optax.sgd(1e-2))
            state, metrics = gtp.train_step(loss, optax.sgd(1e-2))(state, x)
            found.append(jax.tree.map(np.asarray, (state.params, metrics["loss"])))
            shape = model.arrays.stack.layers.two.get_raw_value().shape
    assert shape == (2, 21, 16)
    same(found[1], found[0], atol=1e-12)
