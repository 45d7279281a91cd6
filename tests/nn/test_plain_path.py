"""Models of gtp_jax under `nnx.jit` with `nnx.Optimizer` and stock orbax are models like any other, on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

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
        self.conv = gtp.Conv(24, 24, (3,), **F64, rngs=rngs)
        self.positions = gtp.Param(nnx.initializers.normal(0.1)(rngs.params(), (1, 8, 24), jnp.float64))
        self.head = gtp.Dense(24, 10, use_bias=True, **WIDE, rngs=rngs)  # 10: gtp shards the input features
        self.norm = nnx.BatchNorm(10, dtype=jnp.float64, **F64, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.head(self.conv(self.blocks(self.into(x) + self.positions.gather()))))


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
}


def trainer(mesh, optimizer="adamw"):
    """A model and its optimizer, made under the mesh in scope."""
    model = gtp.init(Model, nnx.Rngs(0, dropout=1))
    return model, nnx.Optimizer(model, OPTIMIZERS[optimizer](), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(jnp.cos(3 * model(x))))(model)
    optimizer.update(model, gradients)
    return loss


def batch(number):
    return np.random.default_rng(number).normal(size=(24, 8, 24))


@functools.cache
def losses(mesh, optimizer="adamw", steps=4):
    with mesh_in_scope(mesh):
        model, own = trainer(mesh, optimizer)
        return [np.asarray(step(model, own, batch(number))) for number in range(steps)]


def states(model, optimizer):
    """What stock orbax saves; random keys as their words, which it knows."""
    both = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    return jax.tree.map(lambda a: jax.random.key_data(a) if _is_key(a) else a, both)


def put(model, optimizer, restored):
    like = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    keyed = jax.tree.map(lambda a, b: jax.random.wrap_key_data(b) if _is_key(a) else b, like, restored)
    nnx.update(model, keyed["model"])
    nnx.update(optimizer, keyed["optimizer"])


def _is_key(a):
    return jnp.issubdtype(a.dtype, jax.dtypes.prng_key)


def slow(*meshes):
    return [pytest.param(mesh, marks=pytest.mark.slow) for mesh in meshes]


@pytest.mark.parametrize("mesh", ["gtp 4 x tp 2", *slow("gtp 8", "dp 2 x gtp 2 x tp 2", "gtp 3")])
def test_every_step_is_that_without_a_mesh(mesh, x64):
    assert_close(losses(mesh), losses(None))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["gtp 4 x tp 2", *slow("gtp 8", "gtp 3")])
def test_adafactor_does_not_depend_on_the_mesh(mesh, x64):
    """Its factors are of logical arrays; optax has them in float32, whatever the parameters."""
    found, wanted = losses(mesh, "adafactor"), losses(None, "adafactor")
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert abs(wanted[-1] - losses(None)[-1]) > 1e-3  # and it is not AdamW


def test_arrays_have_logical_shapes_and_are_sharded(x64):
    def shapes(state):
        return {path: v.get_value().shape for path, v in nnx.to_flat_state(state)}

    plain = [nnx.state(one) for one in trainer(None)]
    with mesh_in_scope("gtp 4 x tp 2"):
        model, optimizer = trainer("gtp 4 x tp 2")
        moments = optimizer.opt_state[0].mu
        for after_a_step in (False, True):
            if after_a_step:
                step(model, optimizer, batch(0))
            for found, wanted in zip((nnx.state(model), nnx.state(optimizer)), plain, strict=True):
                assert shapes(found) == shapes(wanted)
            for kernel in (model.head.kernel, moments["head"]["kernel"], model.conv.kernel, moments["positions"]):
                value = kernel.get_value()
                assert value.addressable_shards[0].data.size == value.size // 4


@pytest.mark.slow
@pytest.mark.parametrize("after", ["gtp 4 x tp 2", *slow(None, "gtp 8", "gtp 3")])
def test_stock_orbax_restores_a_step_of_gtp_8_elsewhere(after, tmp_path, x64):
    with mesh_in_scope("gtp 8"), ocp.StandardCheckpointer() as checkpointer:
        model, optimizer = trainer("gtp 8")
        for number in range(2):
            step(model, optimizer, batch(number))
        saved = states(model, optimizer)
        checkpointer.save(tmp_path / "step", saved)
        checkpointer.wait_until_finished()
        saved = jax.tree.map(np.asarray, saved)
    with mesh_in_scope(after), ocp.StandardCheckpointer() as checkpointer:
        model, optimizer = trainer(after)
        like = states(model, optimizer)
        restored = checkpointer.restore(tmp_path / "step", jax.tree.map(ocp.utils.to_shape_dtype_struct, like))
        for found, wanted, own in zip(*map(jax.tree.leaves, (restored, saved, like)), strict=True):
            assert np.asarray(found).tobytes() == wanted.tobytes() and found.sharding == own.sharding
        put(model, optimizer, restored)
        assert_close([step(model, optimizer, batch(number)) for number in (2, 3)], losses(None)[2:])


@pytest.mark.slow
@pytest.mark.parametrize("after", ["gtp 4 x tp 2", *slow(None)])
def test_checkpoints_take_an_nnx_state_with_its_random_keys(after, tmp_path, x64):
    with mesh_in_scope("gtp 8"), Checkpoints(tmp_path) as checkpoints:
        model, optimizer = trainer("gtp 8")
        for number in range(2):
            step(model, optimizer, batch(number))
        checkpoints.save(2, nnx.state((model, optimizer)), {"batches": 2})
    with mesh_in_scope(after), Checkpoints(tmp_path) as checkpoints:
        model, optimizer = trainer(after)
        state, extra = checkpoints.restore(nnx.state((model, optimizer)))
        nnx.update((model, optimizer), state)
        assert extra == {"batches": 2} and _is_key(model.blocks.layers.dropout.rngs.key.get_value())
        assert_close([step(model, optimizer, batch(number)) for number in (2, 3)], losses(None)[2:])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["gtp 4 x tp 2", *slow(None)])
def test_a_weight_takes_the_logical_array(mesh, x64):
    rng = np.random.default_rng(0)
    with mesh_in_scope(mesh):
        model, optimizer = trainer(mesh)
        sharding = model.head.kernel.get_value().sharding
        for kernel in (model.head.kernel, model.conv.kernel, model.positions, model.blocks.layers.mlp.down.kernel):
            pretrained = rng.normal(size=kernel.get_value().shape)
            kernel[...] = pretrained
            np.testing.assert_array_equal(kernel.get_value(), pretrained)
        assert model.head.kernel.get_value().sharding == sharding
        pretrained = {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
        found = step(model, optimizer, batch(0))
    plain, own = trainer(None)
    for path, v in nnx.iter_graph(plain):
        if isinstance(v, nnx.Param):
            v[...] = pretrained[path]
    assert_close(found, step(plain, own, batch(0)))


@pytest.mark.parametrize("mesh", ["gtp 8", None])
@pytest.mark.parametrize(
    "make",
    [
        lambda rngs: gtp.Dense(24, 16, rngs=rngs),
        lambda rngs: gtp.Conv(24, 16, (1,), rngs=rngs),
        lambda rngs: gtp.Stack(lambda rngs: gtp.Dense(24, 24, rngs=rngs), 2, rngs=rngs),
    ],
)
def test_an_array_of_another_shape_is_refused(make, mesh):
    with mesh_in_scope(mesh):
        model = gtp.init(make, nnx.Rngs(0))
        kernel = model.layers.kernel if isinstance(model, gtp.Stack) else model.kernel
        array = kernel.get_value()
        kernel.set_value(jnp.ones((*array.shape[:-1], 8)))
        expected = (
            r"the weight of shape \(.*, (16|24)\) of \w+ holds an array of shape \(.*, 8\)"
            r".*`kernel\.set_value\(array\)`.*partition the array first as P"
        )
        with pytest.raises(ValueError, match=expected):
            model(jnp.ones((8, 4, 24)))
        with pytest.raises(ValueError, match=expected.replace(r"\w+", r"[\w.]+")):
            gtp.TrainState.create(model, optax.sgd(0.1))
        kernel.set_value(array)  # as the message says
        model(jnp.ones((8, 4, 24)))


@pytest.mark.parametrize(
    "make", [lambda rngs: gtp.Dense(24, 16, rngs=rngs), lambda rngs: gtp.Conv(24, 16, 1, rngs=rngs)]
)
@pytest.mark.filterwarnings("error:Variable hooks")
def test_an_array_that_would_be_repeated_is_refused(make):
    """NNX repeats it, as numpy does; a scalar fills a weight as in NNX."""
    plain = nnx.Param(jnp.zeros((2, 3)))
    plain[...] = jnp.arange(3.0)
    assert plain[...].tolist() == [[0, 1, 2]] * 2
    kernel = make(nnx.Rngs(0)).kernel
    for value in (jnp.ones(16), np.ones((1, 16)), jnp.ones((1,) * kernel.ndim)):
        with pytest.raises(
            ValueError, match=r"of shape \(.*1.*\) is assigned to a weight of shape .*24, 16\), and would"
        ):
            kernel[...] = value
    kernel[...] = 0.5
    np.testing.assert_array_equal(kernel[...], np.full(kernel.shape, 0.5))
    kernel[...] = kernel[...].at[0].set(1)
    kernel[...] = 2 * np.asarray(kernel[...])
    assert float(kernel[...].max()) == 2
    nnx.Optimizer(make(nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param)  # whose variables have a parameter's metadata


@pytest.mark.slow
def test_a_recipe_in_scope_is_that_of_a_step():
    """Bit for bit what `train_step(recipe=)` computes."""
    make = lambda rngs: gtp.Stack(lambda rngs: gtp.MLP(128, 256, dtype=jnp.float32, rngs=rngs), 2, rngs=rngs)  # noqa: E731
    x = np.random.default_rng(0).normal(size=(8, 4, 128)).astype(np.float32)
    loss = lambda model, x: jnp.mean(jnp.cos(3 * model(x)))  # noqa: E731
    with mesh_in_scope("gtp 4 x tp 2"):
        model, tx = gtp.init(make, nnx.Rngs(0)), optax.sgd(0.1)
        state = gtp.TrainState.create(gtp.init(make, nnx.Rngs(0)), tx)
        wanted = float(gtp.train_step(loss, tx, recipe=gtp.NVFP4())(state, x)[1]["loss"])
        own = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def one(model, own):
            value, gradients = nnx.value_and_grad(lambda model: loss(model, x))(model)
            own.update(model, gradients)
            return value

        with gtp.use_recipe(gtp.NVFP4()):
            found = float(one(model, own))
        assert found == wanted != float(loss(gtp.init(make, nnx.Rngs(0)), x))
