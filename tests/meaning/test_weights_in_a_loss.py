"""A loss may read, change and pass on a model's weights, whatever a step has gathered or quantized of them ahead."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from selection import pairwise

import gtp_jax as gtp

from .test_models_on_meshes import assert_equal, scope

BATCH, LENGTH, WIDTH = 8, 4, 32
DTYPES = dict(dtype="float64", param_dtype="float64")
DP = dict(dp=2, gtp=2, tp=2)  # dp divides what is stored of a weight


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = gtp.Dense(WIDTH, {"a": WIDTH, "b": WIDTH}, rngs=rngs, **DTYPES)
        self.blocks = gtp.Stack(lambda rngs: gtp.MLP(WIDTH, 64, rngs=rngs, **DTYPES), 2, rngs=rngs)

    def __call__(self, x):
        found = self.first(x)
        return self.blocks(found["a"] + jnp.tanh(found["b"]))


def mean_of(model, batch):
    return jnp.mean(jnp.sin(model(batch["x"])))


def penalized(model, batch):
    return mean_of(model, batch) + 0.01 * sum(jnp.sum(p**2) for p in jax.tree.leaves(nnx.state(model, nnx.Param)))


def read(model, batch):
    return mean_of(model, batch) + 0.01 * jnp.sum(model.first.kernel["b"][...] ** 2)


def scaled(model, batch):
    graph, params = nnx.split(model)
    return mean_of(nnx.merge(graph, jax.tree.map(lambda p: 0.5 * p, params)), batch)


def one_of_a_layer_replaced(model, batch):
    graph, params = nnx.split(model)
    params["first"]["kernel"]["b"] = jax.tree.map(lambda p: 0.5 * p, params["first"]["kernel"]["b"])
    return mean_of(nnx.merge(graph, params), batch)


def one_of_a_stack_replaced(model, batch):
    graph, params = nnx.split(model)
    down = params["blocks"]["layers"]["down"]
    down["kernel"] = jax.tree.map(lambda p: 0.5 * p, down["kernel"])
    return mean_of(nnx.merge(graph, params), batch)


def rematerialized(model, batch):
    call = nnx.remat(lambda module, x: module(x))
    found = call(model.first, batch["x"])
    return jnp.mean(jnp.sin(call(model.blocks, found["a"] + jnp.tanh(found["b"]))))


LOSSES = [penalized, read, scaled, one_of_a_layer_replaced, one_of_a_stack_replaced, rematerialized]


def halved(params, loss):
    """The parameters that a loss computes with, where it replaces some."""
    half = lambda a: 0.5 * a  # noqa: E731
    if loss is scaled:
        return jax.tree.map(half, params)
    if loss is one_of_a_layer_replaced:
        kernels = params["first"]["kernel"]
        return params | {"first": {"kernel": kernels | {"b": half(kernels["b"])}}}
    if loss is one_of_a_stack_replaced:
        layers = params["blocks"]["layers"]
        return params | {"blocks": {"layers": layers | {"down": {"kernel": half(layers["down"]["kernel"])}}}}
    return params


def computed(loss, degrees, recipe=None, before=lambda params: params, **options):
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH))
    with scope(degrees):
        model = gtp.init(Model, nnx.Rngs(0))
        state = gtp.TrainState.create(model, optax.identity())
        run = jax.jit(lambda s, b: gtp.train.loss_and_gradients(loss, s, b, recipe=recipe, **options))
        state = gtp.TrainState(before(state.params), state.opt_state, state.step, state.model_def, state.model_state)
        return jax.tree.map(np.asarray, run(state, {"x": jnp.asarray(x)}))


NAMES = {loss.__name__: loss for loss in LOSSES}


@pytest.mark.parametrize(("name", "microbatches"), pairwise(NAMES, [1, 2], usual=1))
def test_over_dp_it_means_what_it_means_without_a_mesh(name, microbatches, x64):
    loss = NAMES[name]
    assert_equal(computed(loss, DP, microbatches=microbatches), computed(loss, None, microbatches=microbatches))


@pytest.mark.full
@pytest.mark.parametrize(("loss", "degrees"), pairwise(LOSSES[2:], [DP, dict(gtp=4)]))
def test_under_a_recipe_what_a_loss_computes_with_is_quantized(loss, degrees, x64):
    recipe = gtp.MXFP8(exclude=(), high_precision_first=1)
    found = computed(loss, degrees, recipe)[0]
    wanted = computed(mean_of, degrees, recipe, lambda params: halved(params, loss))[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert abs(found - computed(loss, degrees)[0]) > 1e-9  # codes travelled


def of_local(loss):
    """The sum over a rank's own part that local view wants, of this loss."""
    return lambda model, batch: (loss(model, batch), jnp.float64(1))


def test_summed_last_a_loss_that_reads_a_weight_gets_no_number(x64):
    """Gradients are then taken of whole shards, in whose place are placeholders."""
    options = dict(microbatches=2, view="local", reduce_over_dp="last")
    assert np.isfinite(computed(of_local(mean_of), dict(dp=2, gtp=2), **options)[0])
    assert np.isnan(computed(of_local(penalized), dict(dp=2, gtp=2), **options)[0])
    with pytest.raises(ValueError, match=naming("(32, 32) 'last' reduce_over_dp")):
        computed(of_local(read), dict(dp=2, gtp=2), **options)


@pytest.mark.parametrize("loss", [scaled, pytest.param(rematerialized, marks=pytest.mark.full)])
def test_summed_last_a_loss_that_replaces_a_weight_is_refused(loss, x64):
    with pytest.raises(ValueError, match=naming("replaced nnx.remat reduce_over_dp")):
        computed(of_local(loss), dict(dp=2, gtp=2), microbatches=2, view="local", reduce_over_dp="last")


def test_layers_alike_stay_alike_in_a_loss(x64):
    class Alike(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=rngs, **DTYPES) for _ in range(2))

    def apart(model, batch):
        states = [nnx.split(layer)[1] for layer in model.layers]
        return sum(jnp.square(d).sum() for d in jax.tree.leaves(jax.tree.map(jnp.subtract, *states)))

    with scope(DP):
        state = gtp.TrainState.create(gtp.init(Alike, nnx.Rngs(0)), optax.identity())
        run = jax.jit(lambda state, x: gtp.train.loss_and_gradients(apart, state, {"x": x}))
        loss, gradients = run(state, np.ones((8, WIDTH)))
    one, other = (gradients["layers"][name]["kernel"] for name in ("0", "1"))
    assert loss > 0
    np.testing.assert_allclose(one, -other)
