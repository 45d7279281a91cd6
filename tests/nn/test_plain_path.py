"""Models of gtp_jax under `nnx.jit` with `nnx.Optimizer` are models like any other, on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from selection import pairwise

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints

from .arrays import assert_close, mesh_in_scope

F64 = dict(param_dtype=jnp.float64)
WIDE = dict(dtype=jnp.float64, **F64)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.mlp = gtp.MLP(24, 40, **WIDE, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.mlp(x))


class Model(nnx.Module):
    """Our modules and Flax's, with parameters, statistics and keys."""

    def __init__(self, rngs):
        self.into = nnx.Linear(24, 24, **F64, rngs=rngs)
        self.blocks = gtp.Stack(Block, 2, rngs=rngs)
        self.conv = gtp.nn.Conv(24, 24, (3,), **F64, rngs=rngs)
        self.positions = gtp.Param(nnx.initializers.normal(0.1)(rngs.params(), (1, 8, 24), jnp.float64))
        self.head = gtp.Dense(24, 10, use_bias=True, **WIDE, rngs=rngs)  # 10: gtp shards the input features
        self.norm = nnx.BatchNorm(10, dtype=jnp.float64, **F64, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.head(self.conv(self.blocks(self.into(x) + self.positions.gather()))))


def trainer():
    """A model and its optimizer, made under the mesh in scope."""
    model = gtp.init(Model, nnx.Rngs(0, dropout=1))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(jnp.cos(3 * model(x))))(model)
    optimizer.update(model, gradients)
    return loss


def batch(number):
    return np.random.default_rng(number).normal(size=(24, 8, 24))


@functools.cache
def losses(mesh, steps=4):
    with mesh_in_scope(mesh):
        model, own = trainer()
        return [np.asarray(step(model, own, batch(number))) for number in range(steps)]


def _is_key(a):
    return jnp.issubdtype(a.dtype, jax.dtypes.prng_key)


@pytest.mark.full
def test_arrays_have_logical_shapes_and_the_places_of_an_abstract_model(x64):
    def shapes(state):
        return {path: v.get_value().shape for path, v in nnx.to_flat_state(state)}

    plain = [nnx.state(one) for one in trainer()]
    with mesh_in_scope("gtp 4 x tp 2"):
        model, optimizer = trainer()
        abstract = nnx.to_flat_state(nnx.state(gtp.nn.abstract_model(lambda _: Model(nnx.Rngs(0, dropout=1)))))
        for (path, own), (_, place) in zip(nnx.to_flat_state(nnx.state(model)), abstract, strict=True):
            own, place = own.get_value(), place.get_value()
            assert own.dtype == place.dtype and own.sharding.is_equivalent_to(place.sharding, own.ndim), path
        moments = optimizer.opt_state[0].mu
        for after_a_step in (False, True):
            if after_a_step:
                step(model, optimizer, batch(0))
            for found, wanted in zip((nnx.state(model), nnx.state(optimizer)), plain, strict=True):
                assert shapes(found) == shapes(wanted)
            for kernel in (model.head.kernel, moments["head"]["kernel"], model.conv.kernel, moments["positions"]):
                value = kernel.get_value()
                assert value.addressable_shards[0].data.size == value.size // 4


@pytest.mark.full
@pytest.mark.parametrize("after", ["gtp 4 x tp 2", None])
def test_checkpoints_take_an_nnx_state_with_its_random_keys(after, tmp_path, x64):
    with mesh_in_scope("gtp 8"), Checkpoints(tmp_path) as checkpoints:
        model, optimizer = trainer()
        for number in range(2):
            step(model, optimizer, batch(number))
        checkpoints.save(2, nnx.state((model, optimizer)), {"batches": 2})
    with mesh_in_scope(after), Checkpoints(tmp_path) as checkpoints:
        model, optimizer = trainer()
        state, extra = checkpoints.restore(nnx.state((model, optimizer)))
        nnx.update((model, optimizer), state)
        assert extra == {"batches": 2} and _is_key(model.blocks.layers.dropout.rngs.key.get_value())
        assert_close([step(model, optimizer, batch(number)) for number in (2, 3)], losses(None)[2:])


MAKE = {
    "Dense": lambda rngs: gtp.Dense(24, 16, rngs=rngs),
    "Conv": lambda rngs: gtp.nn.Conv(24, 16, (1,), rngs=rngs),
    "Stack": lambda rngs: gtp.Stack(lambda rngs: gtp.Dense(24, 24, rngs=rngs), 2, rngs=rngs),
}


@pytest.mark.parametrize("name, mesh", pairwise(MAKE, ["gtp 8", None], usual=4))
def test_an_array_of_another_shape_is_refused(name, mesh):
    with mesh_in_scope(mesh):
        model = gtp.init(MAKE[name], nnx.Rngs(0))
        kernel = model.layers.kernel if isinstance(model, gtp.Stack) else model.kernel
        array = kernel.get_value()
        kernel.set_value(jnp.ones((*array.shape[:-1], 8)))
        expected = naming(
            f"{array.shape[name == 'Stack' :]} {(*array.shape[:-1], 8)} `kernel.set_value(array)` partition"
        )
        with pytest.raises(ValueError, match=expected):
            model(jnp.ones((8, 4, 24)))
        with pytest.raises(ValueError, match=expected):
            gtp.TrainState.create(model, optax.sgd(0.1))
        kernel.set_value(array)  # as the message says
        nnx.jit(lambda model, x: model(x))(model, np.ones((8, 4, 24), np.float32))


@pytest.mark.parametrize("name", ["Dense", "Conv"])
@pytest.mark.filterwarnings("error:Variable hooks")
def test_an_array_that_would_be_repeated_is_refused(name):
    """NNX repeats it, as numpy does; a scalar fills a weight as in NNX."""
    plain = nnx.Param(jnp.zeros((2, 3)))
    plain[...] = jnp.arange(3.0)
    assert plain[...].tolist() == [[0, 1, 2]] * 2
    kernel = MAKE[name](nnx.Rngs(0)).kernel
    for value in (jnp.ones(16), np.ones((1, 16)), jnp.ones((1,) * kernel.ndim)):
        with pytest.raises(ValueError, match=naming(f"{value.shape} {kernel.shape}")):
            kernel[...] = value
    kernel[...] = 0.5
    np.testing.assert_array_equal(kernel[...], np.full(kernel.shape, 0.5))
    kernel[...] = kernel[...].at[0].set(1)
    kernel[...] = 2 * np.asarray(kernel[...])
    assert float(kernel[...].max()) == 2
    nnx.Optimizer(MAKE[name](nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param)
