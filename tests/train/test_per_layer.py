"""Which optimizers treat the layers of a `Stack` as one tensor, and `per_layer`, which has them see each layer."""

import functools
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from messages import naming
from selection import others_full

import gtp_jax as gtp

LAYERS, WIDTH = 3, 8
SHAPES = {"kernel": (WIDTH, 2 * WIDTH), "bias": (2 * WIDTH,)}


class Block(nnx.Module):
    """A layer with a matrix and a vector."""

    def __init__(self, rngs):
        make = lambda shape: nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float64))  # noqa: E731
        self.kernel, self.bias = make(SHAPES["kernel"]), make(SHAPES["bias"])

    def __call__(self, x):
        return x + jnp.tanh(x @ self.kernel.get_value() + self.bias.get_value()) @ self.kernel.get_value().T


class Model(nnx.Module):
    """Two stacks of different lengths, and a matrix outside of both."""

    def __init__(self, rngs):
        self.first = gtp.Stack(Block, LAYERS, rngs=rngs)
        self.second = gtp.Stack(Block, 2, rngs=rngs)
        self.head = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH), jnp.float64))

    def __call__(self, x):
        return self.second(self.first(x)) @ self.head.get_value()


def squares(model, x):
    return jnp.mean(model(x) ** 2)


def wide(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def labels(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "other" if "bias" in str(path) else "muon", params)


def mixed():
    return optax.multi_transform({"muon": muon(), "other": optax.lamb(0.1)}, labels)


def muon(rate=0.1):
    return optax.contrib.muon(rate, ns_steps=2)


def clipped(optimizer):
    return optax.chain(optax.clip_by_global_norm(0.5), optimizer)


def in_parts(optimizer):
    return optax.MultiSteps(optimizer, 2).gradient_transformation()


def small_adafactor():
    return optax.adafactor(0.1, min_dim_size_to_factor=4)


# whether the layers of a stack are one tensor to an optimizer
OPTIMIZERS = {
    "sgd": (False, lambda: optax.sgd(0.1)),
    "adamw with a schedule": (False, lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 9))),
    "schedule-free": (False, lambda: optax.contrib.schedule_free_adamw(0.1)),
    "MultiSteps": (False, lambda: in_parts(optax.adam(0.1))),
    "flattened adam": (False, lambda: optax.flatten(optax.adam(0.1))),
    "lbfgs without a line search": (False, lambda: optax.lbfgs(0.1, memory_size=2, linesearch=None)),
    "muon": (True, lambda: muon()),
    "lamb": (True, lambda: optax.lamb(0.1)),
    "adafactor": (True, small_adafactor),
    "decay of matrices alone": (True, lambda: optax.adamw(0.1, weight_decay=0.1, mask=wide)),
    "clip by global norm, lamb": (True, lambda: clipped(optax.lamb(0.1))),
    "MultiSteps of lamb": (True, lambda: in_parts(optax.lamb(0.1))),
}
PER_LAYER = {
    "adafactor": lambda each: each(small_adafactor()),
    "decay of matrices alone": lambda each: each(optax.adamw(0.1, weight_decay=0.1, mask=wide)),
    "in a chain": lambda each: clipped(each(muon(optax.linear_schedule(0.1, 0.01, 3)))),
    "around multi_transform": lambda each: each(mixed()),
    "within multi_transform": lambda each: optax.multi_transform(
        {"muon": each(muon()), "other": each(optax.lamb(0.1))}, labels
    ),
    "with an injected rate": lambda each: optax.inject_hyperparams(lambda learning_rate: each(muon(learning_rate)))(
        0.1
    ),
    "around MultiSteps": lambda each: each(in_parts(optax.lamb(0.1))),
    "within MultiSteps": lambda each: in_parts(each(optax.lamb(0.1))),
}


@functools.cache
def made():
    return nnx.split(nnx.jit(lambda: Model(nnx.Rngs(0)))())


@pytest.fixture
def model(x64):
    graph, state = made()
    return nnx.merge(graph, jax.tree.map(jnp.copy, state))


def listed(tree, axis=0):
    """Returns parameters, each layer's arrays by themselves."""
    layers = {
        name: [jax.tree.map(lambda a: np.take(np.asarray(a), i, axis), tree[name]["layers"]) for i in range(count)]  # noqa: B023
        for name, count in (("first", LAYERS), ("second", 2))
    }
    return {**layers, "head": tree["head"]}


def gradients_of(params, steps=3):
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=(steps, *p.shape))), params)


@functools.partial(jax.jit, static_argnums=0)
def run(optimizer, params, gradients):
    def step(carry, found):
        params, state = carry
        updates, state = optimizer.update(found, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), gradients)[0]


def largest_difference(stacked, in_list):
    pairs = zip(jax.tree.leaves(listed(stacked)), jax.tree.leaves(in_list), strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)


def params_of(model):
    return jax.tree.map(jnp.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize(
    "name", others_full(OPTIMIZERS, ["schedule-free", "clip by global norm, lamb", "decay of matrices alone"])
)
def test_a_warning_names_the_optimizers_whose_updates_are_not_those_of_a_list(name, model):
    as_one, make = OPTIMIZERS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gtp.TrainState.create(model, make())
    found = [str(one.message) for one in caught if "layers of a `Stack` as one tensor" in str(one.message)]
    assert len(found) == as_one
    if as_one:
        assert re.search(naming("gtp_jax.train.per_layer(optimizer)"), found[0])
        assert "first.layers." in found[0] and "head" not in found[0]
    params = params_of(model)
    gradients = gradients_of(params)
    stacked, _ = run(make(), params, gradients)
    in_list, _ = run(make(), listed(params), listed(gradients, 1))
    difference = largest_difference(stacked, in_list)
    assert difference > 1e-5 if as_one else difference < 1e-10


@pytest.mark.parametrize("name", others_full(PER_LAYER, ["with an injected rate", "within multi_transform"]))
def test_per_layer_is_the_optimizer_on_a_list_of_layers(name, model):
    make, params = PER_LAYER[name], params_of(model)
    gradients = gradients_of(params)
    stacked, state = run(make(lambda optimizer: gtp.train.per_layer(optimizer, model)), params, gradients)
    in_list, _ = run(make(lambda optimizer: optimizer), listed(params), listed(gradients, 1))
    assert largest_difference(stacked, in_list) < 1e-12
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if str(getattr(path[-1], "name", "")) in ("count", "mini_step", "gradient_step"):
            assert leaf.shape == ()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the optimizer treats")
        gtp.TrainState.create(model, make(gtp.train.per_layer))


@pytest.mark.full
def test_nnx_optimizer_takes_it_with_the_model(model):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, WIDTH)))
    optimizer = nnx.Optimizer(model, gtp.train.per_layer(optax.lamb(0.1), model), wrt=nnx.Param)
    in_list, before = optax.lamb(0.1), params_of(model)

    @nnx.jit
    def step(model, optimizer):
        gradients = nnx.grad(squares)(model, x)
        optimizer.update(model, gradients)
        return nnx.to_pure_dict(gradients)

    @jax.jit
    def wanted(params, gradients):
        updates, _ = in_list.update(gradients, in_list.init(params), params)
        return optax.apply_updates(params, updates)

    gradients = step(model, optimizer)
    assert largest_difference(params_of(model), wanted(listed(before), listed(gradients))) < 1e-12


REFUSED = {  # what a step's state is created with
    "first.layers one layer optax.chain(optax.clip_by_global_norm": lambda: gtp.train.per_layer(
        clipped(optax.lamb(0.1))
    ),
    "first.layers layer": lambda: gtp.train.per_layer(optax.contrib.dog(1.0)),  # which takes a norm of all in `init`
    "first.layers one layer": lambda: gtp.train.per_layer(optax.lbfgs(0.1, memory_size=2, linesearch=None)),
    "random": lambda: gtp.train.per_layer(optax.noisy_sgd(0.1, key=jax.random.key(0))),
    "`optax.flatten`": lambda: optax.flatten(gtp.train.per_layer(optax.lamb(0.1))),
}


def test_what_cannot_be_mapped_over_layers_is_refused(model):
    for message, make in REFUSED.items():
        with pytest.raises(ValueError, match=naming(message)):
            gtp.TrainState.create(model, make())
    with pytest.raises(ValueError, match=naming("`gtp_jax.train.per_layer(optimizer, model)`")):
        gtp.train.per_layer(optax.lamb(0.1)).init(params_of(model))
    one = jax.tree.map(lambda p: p[0], params_of(model))
    with pytest.raises(ValueError, match=naming("(16,) 'first.layers.bias' 3")):
        gtp.train.per_layer(optax.lamb(0.1), model).init(one)


def over_mean_magnitude():
    """An optimizer that is not elementwise: it divides each gradient by its mean magnitude."""
    update = lambda grads, state, params=None: (jax.tree.map(lambda g: g / jnp.mean(jnp.abs(g)), grads), state)  # noqa: E731
    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


KINDS = {
    "adafactor": lambda: gtp.train.per_layer(optax.adafactor(0.1, min_dim_size_to_factor=2)),
    "mean": lambda: gtp.train.per_layer(over_mean_magnitude()),
    "muon": lambda: optax.chain(optax.clip(1.0), gtp.train.per_layer(optax.contrib.muon(0.1))),
}


@pytest.mark.parametrize("kind", others_full(KINDS, ["mean"]))
def test_of_padded_weights_it_sees_each_layers_logical_array(kind, x64):
    optimizer = KINDS[kind]

    def stepped(**degrees):
        dtypes = dict(dtype="float64", param_dtype="float64")
        mesh = gtp.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])
        with jax.set_mesh(mesh), gtp.layout.even_shares():
            make = lambda rngs: gtp.Stack(lambda rngs: gtp.Dense(6, 6, rngs=rngs, **dtypes), 2, rngs=rngs)  # noqa: E731
            state = gtp.TrainState.create(gtp.init(make, nnx.Rngs(0)), optimizer())
            stored = [a.addressable_shards[0].data.size for a in jax.tree.leaves((state.params, state.opt_state))]
            x = np.random.default_rng(1).normal(size=(8, 6))
            step = gtp.train_step(lambda model, x: jnp.mean(model(x) ** 2), optimizer())
            padded, (state, _) = bool(state.model_def.padded), step(state, x)
            return padded, max(stored), jax.tree.map(np.asarray, state.logical().params)

    (no, whole, alone), (yes, share, found) = stepped(gtp=1), stepped(dp=2, gtp=4)
    assert (no, yes) == (False, True) and whole == 2 * 6 * 6
    assert share <= 12, "weights and moments are divided"
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
