"""Optimizers that need the loss, and states that a step refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from messages import naming
from placed import placed
from selection import others_full

import gtp_jax as gtp

X = np.random.default_rng(0).normal(size=(8, 2, 16))


class Regression(nnx.Module):
    def __init__(self, rngs):
        self.up = gtp.Dense(16, 32, parallel=None, dtype=jnp.float64, param_dtype=jnp.float64, rngs=rngs)
        self.down = nnx.Linear(32, 16, dtype=jnp.float64, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def loss(model, x):
    return jnp.mean((model(x) - x**2) ** 2)


def plain_loss(params, x):
    """The same in jax.numpy alone."""
    up, down = params["up"], params["down"]
    hidden = jnp.tanh(x @ up["kernel"])
    return jnp.mean((hidden @ down["kernel"] + down["bias"] - x**2) ** 2)


@pytest.fixture
def mesh(x64):
    with jax.set_mesh(gtp.make_mesh(gtp=2, dp=2, devices=jax.devices()[:4])) as mesh:
        yield mesh


def state_of(optimizer):
    return gtp.TrainState.create(placed(Regression), optimizer)


PLATEAU = optax.contrib.reduce_on_plateau(0.5, patience=1, rtol=0.5)
WITH_VALUES = {
    "lbfgs": optax.lbfgs(memory_size=2),
    "backtracking": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8)),
    "keeps gradients": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8, store_grad=True)),
    "reduce_on_plateau": optax.chain(optax.sgd(3.0), PLATEAU),
    "polyak_sgd": optax.polyak_sgd(f_min=0.1),
}


@pytest.mark.parametrize("name", others_full(WITH_VALUES, ["backtracking"]))
def test_an_optimizer_is_passed_the_loss_its_gradient_and_the_loss_as_a_function(name, mesh):
    optimizer, options = WITH_VALUES[name], dict(microbatches=2) if name in ("lbfgs", "backtracking") else {}
    state = state_of(optimizer)
    params = jax.tree.map(np.asarray, state.params)

    @jax.jit
    def plain_step(params, opt_state):
        value, grad = jax.value_and_grad(plain_loss)(params, X)
        extra = dict(value=value, grad=grad, value_fn=lambda params: plain_loss(params, X))
        updates, opt_state = optimizer.update(grad, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state, step = optimizer.init(params), gtp.train_step(loss, optimizer, **options)
    for _ in range(3):
        state, metrics = step(state, X)
        params, opt_state, value = plain_step(params, opt_state)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-9)
    for found, wanted in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-9)


def test_a_history_of_gradients_is_sharded_like_the_parameter(mesh):
    state = state_of(optax.lbfgs(memory_size=2))
    history = state.opt_state[0].diff_updates_memory["up"]["kernel"]
    assert history.shape == (2, 16, 32) and history.addressable_shards[0].data.size == history.size // 4


def test_a_line_search_on_clipped_gradients_is_refused(mesh):
    step = gtp.train_step(loss, optax.lbfgs(), max_grad_norm=1.0)
    with pytest.raises(ValueError, match=naming("`max_grad_norm=None`")):
        step(state_of(optax.lbfgs()), X)


def test_a_state_that_a_step_has_taken_is_refused(mesh):
    optimizer = optax.sgd(0.1)
    first = state_of(optimizer)
    step = gtp.train_step(loss, optimizer)
    step(first, X)
    calls = {"step": lambda: step(first, X), "eval_step": lambda: gtp.eval_step(loss)(first, X)}
    calls |= {"diagnose": lambda: gtp.train.diagnose(loss, first, X), "model": first.model}
    calls |= {"gradients": lambda: gtp.train.loss_and_gradients(loss, first, X)}
    for call in calls.values():
        with pytest.raises(ValueError, match=naming("`state` before 'params.down.bias'")):
            call()


def test_a_state_of_another_optimizer_is_refused(mesh):
    state = state_of(optax.adam(0.1))
    message = "`state.opt_state` `train_step` `TrainState.create`"
    for make, reason in {optax.sgd: "at", optax.adafactor: "at", optax.lamb: "PyTreeDef"}.items():
        with pytest.raises(ValueError, match=naming(message, reason)):
            gtp.train_step(loss, make(0.1))(state, X)
    for options in ({}, {"skip_nonfinite": False}):
        with pytest.raises(ValueError, match=naming("0.mu float64 bfloat16")):
            gtp.train_step(loss, optax.adam(0.1, mu_dtype="bfloat16"), **options)(state, X)
    gtp.train_step(loss, optax.adam(0.2))(state, X)  # whose arrays are the same


def test_an_optimizer_that_changes_the_form_of_its_state_is_refused(mesh):
    def update(updates, state, params=None):
        return updates, jax.tree.map(lambda g: g.astype("float16"), updates)

    optimizer = optax.GradientTransformation(optax.tree.zeros_like, update)
    for options in ({}, {"skip_nonfinite": False}):
        with pytest.raises(ValueError, match=naming("state float64 float16")):
            gtp.train_step(loss, optimizer, **options)(state_of(optimizer), X)


class WithTarget(nnx.Module):
    def __init__(self, rngs):
        self.online, self.target = Regression(rngs), Regression(rngs)


def to_target(model, x):
    return jnp.mean((model.online(x) - jax.lax.stop_gradient(model.target(x))) ** 2) + loss(model.online, x)


def test_one_array_in_two_parameters_is_trained_as_two(mesh):
    optimizer = optax.sgd(0.1)
    model = placed(WithTarget)
    nnx.update(model.target, nnx.state(model.online))
    state = gtp.TrainState.create(model, optimizer)
    before = jax.tree.map(np.asarray, state.params)
    state, _ = gtp.train_step(to_target, optimizer)(state, X)
    gradient = jax.jit(jax.grad(plain_loss))(before["online"], X)  # the difference is 0 at first
    jax.tree.map(np.testing.assert_array_equal, state.params["target"], before["target"])
    wanted = jax.tree.map(lambda p, g: p - 0.1 * g, before["online"], gradient)
    for found, want in zip(jax.tree.leaves(state.params["online"]), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-12)


def test_a_state_that_holds_one_array_twice_is_refused(mesh):
    optimizer = optax.sgd(0.1)
    state = gtp.TrainState.create(placed(WithTarget), optimizer)
    shared = dataclasses.replace(state, params={name: state.params["online"] for name in ("online", "target")})
    with pytest.raises(ValueError, match=naming("'params.online.down.bias' 'params.target.down.bias'")):
        gtp.train_step(to_target, optimizer)(shared, X)
