"""Meshes that gtp_jax cannot use are refused by name, and a missing one is told; steps follow the mesh of the call."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.nn import abstract_model
from gtp_jax.train import compile_options

X = np.ones((8, 4, 16), np.float32)


def dense(rngs):
    return gtp.Dense(16, 32, dtype=jnp.float32, rngs=rngs)


@functools.cache
def modules():
    """Each kind of call that reads a mesh, of models made without one."""
    rngs, param = nnx.Rngs(0), gtp.Param(jnp.ones((16, 16)))

    @nnx.jit
    def made(rngs):
        mlps = gtp.Stack(lambda rngs: gtp.MLP(16, 32, rngs=rngs), 2, rngs=rngs)
        return dense(rngs), mlps, gtp.nn.Conv(16, 16, 3, rngs=rngs)

    layer, stack, conv = made(rngs)
    state = gtp.TrainState.create(layer, optax.sgd(0.1))
    return {
        "init": lambda: gtp.init(dense, nnx.Rngs(0)),
        "abstract_model": lambda: abstract_model(dense),
        "TrainState.create": lambda: gtp.TrainState.create(layer, optax.sgd(0.1)),
        "a layer": lambda: layer(X),
        "a stack": lambda: stack(X),
        "run_chain": lambda: gtp.nn.run_chain(X, stack),
        "Conv": lambda: conv(X),
        "Param": param.gather,
        "eval_step": lambda: gtp.eval_step(lambda model, x: jnp.mean(model(x)))(state, X),
    }


CALLS = ["init", "abstract_model", "TrainState.create", "a layer", "a stack", "run_chain", "Conv", "Param", "eval_step"]


def explicit():
    axes = (jax.sharding.AxisType.Explicit,) * 3
    return jax.set_mesh(jax.make_mesh((1, 8, 1), ("dp", "gtp", "tp"), axis_types=axes))


MESHES = {  # that cannot be used, and what is said of them
    "explicit axes": (explicit, "Explicit 'dp' 'gtp' 'tp' gtp_jax.make_mesh AxisType.Auto jax.set_mesh"),
    "with mesh": (lambda: gtp.make_mesh(gtp=8), "`with mesh:` ('dp', 'gtp', 'tp') jax.set_mesh gtp_jax.make_mesh"),
}


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
@pytest.mark.parametrize(("call", "mesh"), pairwise(CALLS, MESHES, usual=4))
def test_a_mesh_that_cannot_be_used_is_refused(call, mesh):
    call, (scope, message) = modules()[call], MESHES[mesh]
    with scope(), pytest.raises(ValueError, match=naming(message)):
        call()


def test_a_model_that_is_made_without_a_mesh_on_several_devices_is_told():
    with pytest.warns(UserWarning, match=naming("mesh 8 jax.set_mesh gtp_jax.make_mesh")) as told:
        model = gtp.init(dense, nnx.Rngs(0))
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with jax.set_mesh(gtp.make_mesh(gtp=8)):
            gtp.init(dense, nnx.Rngs(0))
        nnx.jit(lambda model, x: model(x))(model, X)  # a warning once, where it is made


@pytest.mark.parametrize("view", others_full(["global", "local"], ["global"]))
def test_a_step_that_was_built_without_a_mesh_runs_on_that_of_each_call(view):
    loss = lambda model, x: (jnp.sum(model(x) ** 2), x.shape[0])  # noqa: E731
    make = lambda rngs: gtp.MLP(16, 32, dtype=jnp.float32, rngs=rngs)  # noqa: E731
    optimizer = optax.sgd(0.1)
    step, found = gtp.train_step(loss, optimizer, view=view), []
    for degrees in (dict(gtp=4, tp=2), dict(dp=2, gtp=2, tp=2)):
        with jax.set_mesh(gtp.make_mesh(**degrees)):
            first = gtp.TrainState.create(gtp.init(make, nnx.Rngs(0)), optimizer)
            state, metrics = step(jax.jit(functools.partial(jax.tree.map, jnp.copy))(first), X)
            _, built_here = gtp.train_step(loss, optimizer, view=view)(first, X)
            assert metrics["loss"] == built_here["loss"] and metrics["grad_norm"] == built_here["grad_norm"]
            kernel = state.params["up"]["kernel"]["gate"]
            assert kernel.addressable_shards[0].data.size * 8 == kernel.size  # dp divides what is stored, too
            found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, found[0], rtol=1e-6)


def test_a_step_that_was_built_without_a_mesh_has_the_options_of_each_call(monkeypatch):
    given = []
    monkeypatch.setattr("gtp_jax.train._step.platform", lambda: "gpu")
    monkeypatch.setattr("jax.jit", lambda f, **options: given.append(options["compiler_options"]))
    step = gtp.train_step(lambda model, x: 0.0, optax.sgd(0.1), compiler_options={"xla_own": 1})
    for degrees in (dict(gtp=8), dict(gtp=4, tp=2), dict(gtp=8)):
        with jax.set_mesh(gtp.make_mesh(**degrees)):
            step.jitted()
    assert given == [compile_options("gpu", {"xla_own": 1}, tp=tp) for tp in (1, 2)] and given[0] != given[1]


@pytest.mark.parametrize("call", ["init", "abstract_model", "TrainState.create"])
def test_what_puts_arrays_on_devices_is_refused_in_a_trace(call):
    run = modules()[call]
    expected = naming(f"{call}` traces outside abstract_model")
    with jax.set_mesh(gtp.make_mesh(gtp=8)), pytest.raises(ValueError, match=expected):
        jax.eval_shape(lambda: nnx.split(run())[1] if call != "TrainState.create" else run().params)


SIZES = [{"gtp": 8}, {"dp": 8}, {"tp": 8}, {"dp": 2, "gtp": 4}, {"gtp": 4, "tp": 2}]


@pytest.mark.parametrize("sizes", others_full(SIZES, SIZES[-2:]), ids=str)
def test_an_axis_that_the_mesh_lacks_has_degree_one(sizes):
    axes = (jax.sharding.AxisType.Auto,) * len(sizes)
    meshes = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axes), gtp.make_mesh(**{"dp": 1, **sizes})
    losses, shards = [], []
    for mesh in meshes:
        with jax.set_mesh(mesh):
            state = gtp.TrainState.create(gtp.init(dense, nnx.Rngs(0)), optax.sgd(0.1))
            step = gtp.train_step(lambda model, x: jnp.sin(model(x)).mean(), optax.sgd(0.1))
            state, first = step(state, X)
            state, second = step(state, X)
        losses.append((first["loss"], second["loss"]))
        shards.append([leaf.addressable_shards[0].data.shape for leaf in jax.tree.leaves(state.params)])
    assert losses[0] == losses[1] and shards[0] == shards[1]


def test_axes_of_ones_own_need_roles_that_name_them():
    mesh = jax.make_mesh((4, 2), ("gtp", "pp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=naming("'pp' 'dp' gtp_jax.mesh.use_roles gtp_jax.mesh.Roles")),
    ):
        gtp.init(dense, nnx.Rngs(0))
