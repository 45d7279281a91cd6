"""What a loss writes to a parameter is refused by its path, whichever way it is written; nothing else is."""

import dataclasses
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
from gtp_jax.nn import Frozen

from .test_models_on_meshes import scope

WIDTH = 16
MESHES = {"no mesh": None, "dp 2 x gtp 4": dict(dp=2, gtp=4)}


class Block(nnx.Module):
    """A block of stock Flax that can be told to write."""

    def __init__(self, rngs):
        self.linear, self.target = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Param(jnp.ones((WIDTH, WIDTH)))
        self.scale, self.write = nnx.Param(jnp.ones(WIDTH)), None

    def __call__(self, x):
        if self.write is not None:
            self.write(self)
        return x + self.linear(x) @ self.target[...] * self.scale[...]


class Model(nnx.Module):
    """Blocks, a `Stack` of them, and a layer of the library. The model can be told to write, too."""

    def __init__(self, rngs):
        self.places = nnx.Param(jnp.ones((WIDTH, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.stack = gtp.Stack(Block, 2, rngs=rngs)
        self.dense = gtp.Dense(WIDTH, WIDTH, rngs=rngs)
        self.write = None

    @nnx.remat
    def __call__(self, x):
        x = x @ self.places[...]
        for block in self.blocks:
            x = block(x)
        if self.write is not None:
            self.write(self)
        return self.dense(self.stack(x))


@functools.cache
def state_of(mesh):
    with scope(MESHES[mesh]):
        model = gtp.init(Model, nnx.Rngs(0))
        model = model if mesh == "no mesh" else gtp.shard(model, "blocks.*", min_size=64)
        return gtp.TrainState.create(model, optax.sgd(0.1))


def traced(mesh, loss, how="loss_and_gradients"):
    ways = {
        "loss_and_gradients": lambda state, x: gtp.train.loss_and_gradients(loss, state, x),
        "microbatches": lambda state, x: gtp.train.loss_and_gradients(loss, state, x, microbatches=2),
        "train_step": gtp.train_step(loss, optax.sgd(0.1)),
        "eval_step": gtp.eval_step(loss),
    }
    with scope(MESHES[mesh]):
        jax.eval_shape(ways[how], state_of(mesh), jnp.ones((16, WIDTH)))


def halve(block):
    block.target.set_raw_value(0.5 * block.target[...])


def set_attribute(block, value):
    block.target = value


def replace(variable, value):
    object.__setattr__(variable, "_raw_value", value)


WRITES = {
    "set_raw_value": halve,
    "set_value": lambda block: block.target.set_value(0.5 * block.target[...]),
    "an index": lambda block: block.target.__setitem__(0, 0.0),
    "behind Flax's back": lambda block: replace(block.target, 0.5 * block.target[...]),
    "nnx.update": lambda block: nnx.update(block, jax.tree.map(jnp.sin, nnx.state(block, nnx.Param))),
    "another parameter": lambda block: set_attribute(block, nnx.Param(0.5 * block.target[...])),
    "an array": lambda block: set_attribute(block, nnx.data(0.5 * block.target[...])),
    "another type": lambda block: set_attribute(block, nnx.Variable(block.target[...])),
    "another module": lambda block: setattr(block, "linear", jax.tree.map(jnp.sin, block.linear)),
    "the parameter of another": lambda block: set_attribute(block, block.linear.kernel),
    "a new one": lambda block: setattr(block, "new", nnx.Param(jnp.ones(3))),
    "within nnx.remat": nnx.remat(halve),
    "within nnx.cond": lambda block: nnx.cond(block.scale[0] > 0, halve, lambda block: None, block),
    "within a loop": lambda block: nnx.fori_loop(0, 2, lambda _, block: (halve(block), block)[1], block),
}
# what an error names, where that is not the target
NAMES = {"nnx.update": "linear.bias", "another module": "linear.bias", "a new one": "new"}
PLACES = {  # a block, how it is told to write, and its path
    "the loss": (lambda model, write: write(model.blocks[0]), "blocks.0"),
    "a block": (lambda model, write: setattr(model.blocks[1], "write", write), "blocks.1"),
    "a call": (lambda model, write: setattr(model, "write", lambda model: write(model.blocks[1])), "blocks.1"),
}


@pytest.mark.parametrize(
    "way, place, mesh, how",
    pairwise(WRITES, PLACES, MESHES, ["loss_and_gradients", "train_step", "eval_step", "microbatches"]),
)
def test_what_is_written_to_a_parameter_is_refused_by_its_path(way, place, mesh, how):
    put, path = PLACES[place]

    def loss(model, x):
        put(model, WRITES[way])
        return jnp.mean(model(x) ** 2)

    expected = naming(f"{path}.{NAMES.get(way, 'target')}. lost nnx.Variable train_step nnx.clone")
    with pytest.raises(ValueError, match=expected):
        traced(mesh, loss, how)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_layer_of_a_stack_and_a_layer_of_the_library_may_not_write_theirs_either(mesh):
    def of_stack(model, x):
        model.stack.layers.write = halve
        return jnp.mean(model(x))

    def of_own(model, x):
        model.dense.kernel.set_raw_value(0.5 * model.dense.kernel.get_raw_value())
        return jnp.mean(model(x))

    for loss, path in ((of_stack, "target"), (of_own, "dense.kernel")):
        with pytest.raises(ValueError, match=naming(f"{path}.")):
            traced(mesh, loss)


class Fused(nnx.Module):
    """A layer of a `Stack` whose weights are gathered in buffers."""

    def __init__(self, rngs, write):
        self.first, self.second = (gtp.Dense(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.scale, self.write = nnx.Param(jnp.ones(WIDTH)), write

    def __call__(self, x):
        y = nnx.remat(type(self).product)(self, x)
        if self.write is not None:
            self.write(self)
        return y

    def product(self, x):
        return self.second(jnp.tanh(self.first(x))) * self.scale[...]


FUSED = {
    "another's": lambda layer: layer.first.kernel.set_raw_value(layer.second.kernel.get_raw_value()),
    "another's variable": lambda layer: setattr(layer.first, "kernel", layer.second.kernel),
    "another's state": lambda layer: nnx.update(layer.first, nnx.state(layer.second)),
    "a multiple": lambda layer: nnx.update(layer, jax.tree.map(lambda a: 2 * a, nnx.state(layer, nnx.Param))),
}


@pytest.mark.parametrize("view", ["global", "local"])
def test_a_layer_of_a_stack_may_not_set_a_gathered_weight_and_may_pass_it_through_remat(view):
    optimizer = optax.sgd(0.1)

    def step(write):
        with scope(dict(dp=2, gtp=4)):
            model = gtp.nn.abstract_model(lambda rngs: gtp.Stack(lambda rngs: Fused(rngs, write), 2, rngs=rngs))
            one = gtp.train_step(lambda model, x: (jnp.sum(model(x)), x.size), optimizer, view=view)
            jax.eval_shape(one, gtp.TrainState.create(model, optimizer), jnp.ones((16, WIDTH)))

    step(None)
    with pytest.raises(ValueError, match=naming("Fused scale lost nnx.Variable")):
        step(lambda layer: layer.scale.set_raw_value(2 * layer.scale[...]))
    for write in FUSED.values():
        with pytest.raises(ValueError, match=naming("Fused first.kernel lost nnx.Variable")):
            step(write)


def restore(block):
    held = block.target.get_raw_value()
    halve(block)
    block.target.set_raw_value(held)


def write_a_copy(block):
    copy = nnx.clone(block)
    halve(copy)
    copy.linear.kernel[...] = jnp.ones((WIDTH, WIDTH))
    copy.scale = nnx.Param(jnp.ones(3))


def put_a_copy_for_a_while(block):
    held, block.linear = block.linear, nnx.clone(block.linear)
    block.linear.kernel[...] = jnp.ones((WIDTH, WIDTH))
    block.linear = held


def scanned(block):
    body = nnx.remat(lambda block, x: block.linear(x))
    nnx.scan(body, in_axes=(nnx.StateAxes({...: nnx.Carry}), nnx.Carry), out_axes=nnx.Carry, length=2)(
        block, jnp.ones(WIDTH)
    )


def branched(block):
    first, other = nnx.remat(lambda block: block.linear(block.scale[...])), lambda block: block.scale[...]
    nnx.cond(block.scale[0] > 0, first, other, block)


HARMLESS = {
    "set and restored": restore,
    "a copy": write_a_copy,
    "a copy in its place for a while": put_a_copy_for_a_while,
    "what it holds": lambda block: nnx.update(block, jax.tree.map(lambda a: a, nnx.state(block))),
    "a second name": lambda block: setattr(block, "also", block.linear),
    "nnx.remat": nnx.remat(lambda block: block.linear(block.scale[...])),
    "nnx.jit": lambda block: nnx.jit(lambda block: block.linear(block.scale[...]))(block),
    "a scan": scanned,
    "a branch": branched,
    "a loop": lambda block: nnx.fori_loop(
        0, 2, lambda _, b: (nnx.remat(lambda b: b.linear(b.scale[...]))(b), b)[1], block
    ),
}


@pytest.mark.parametrize("way, place, mesh", pairwise(HARMLESS, ["the loss", "a block", "a call"], MESHES))
def test_what_leaves_parameters_as_they_are_is_not(way, place, mesh):
    put, _ = PLACES[place]

    def loss(model, x):
        put(model, HARMLESS[way])
        return jnp.mean(nnx.remat(Model.__call__)(model, x))

    traced(mesh, loss)


def test_a_frozen_weight_is_not_written_either():
    def write(model, x):
        kernel = next(v for _, v in nnx.iter_graph(model) if isinstance(v, Frozen))
        kernel.set_raw_value(jax.tree.map(lambda a: 2 * a, kernel.get_raw_value()))
        return jnp.mean(model(x))

    make = lambda rngs: gtp.nn.lora(gtp.Dense(WIDTH, WIDTH, rngs=rngs), 2, 4.0, rngs=rngs)  # noqa: E731
    with scope(dict(gtp=8)):
        state = gtp.TrainState.create(gtp.init(make, nnx.Rngs(0)), optax.sgd(0.1))
        run = lambda loss: jax.eval_shape(gtp.train_step(loss, optax.sgd(0.1)), state, jnp.ones((8, WIDTH)))  # noqa: E731
        run(lambda model, x: jnp.mean(nnx.remat(lambda model, x: model(x))(model, x)))
        with pytest.raises(ValueError, match=naming("Frozen kernel. lost")):
            run(write)


class Target(nnx.Variable):
    """A weight of a target network."""


class Twins(nnx.Module):
    """A network, and another that follows it, whose weights are of the type `kind`."""

    def __init__(self, kind, rngs):
        self.network = nnx.Sequential(*[nnx.Linear(WIDTH, WIDTH, param_dtype=jnp.float64, rngs=rngs) for _ in range(2)])
        graph, weights = nnx.split(self.network)
        is_variable = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
        weights = jax.tree.map(lambda weight: kind(jnp.sin(weight[...])), weights, is_leaf=is_variable)
        self.target = nnx.merge(graph, weights)

    def follow(self):
        for target, weight in zip(variables(self.target), variables(self.network), strict=True):
            target[...] = followed(target[...], jax.lax.stop_gradient(weight[...]))


def variables(module):
    return [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)]


def followed(target, weight):
    return 0.75 * target + 0.25 * weight


def distance(twins, x):
    return jnp.mean((twins.network(x) - jax.lax.stop_gradient(twins.target(x + 1))) ** 2)


def followed_distance(twins, x):
    twins.follow()
    return distance(twins, x)


def by_flax(x, loss, follow):
    """The weights of both networks after two steps of plain Flax on one device."""
    twins = Twins(Target, nnx.Rngs(0))
    optimizer = nnx.Optimizer(twins, optax.sgd(0.1), wrt=nnx.Param)
    for _ in range(2):
        optimizer.update(twins, nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Param))(twins, x))
        follow(twins)
    return [np.asarray(v[...]) for v in variables(twins)]


@pytest.mark.full
@pytest.mark.parametrize("place", ["in the loss", "between steps"])
def test_a_target_network_follows_as_in_plain_flax_where_an_error_says_to_hold_it(place, x64):
    x, within = jnp.asarray(np.random.default_rng(0).normal(size=(8, WIDTH))), place == "in the loss"

    @jax.jit
    def follow(state):
        target = jax.tree.map(followed, state.params["target"], state.params["network"])
        return dataclasses.replace(state, params={**state.params, "target": target})

    loss = followed_distance if within else distance
    with scope(dict(gtp=8)):
        model = gtp.shard(Twins(Target if within else nnx.Param, nnx.Rngs(0)), nnx.Linear, min_size=64)
        state = gtp.TrainState.create(model, optax.sgd(0.1))
        step = gtp.train_step(loss, optax.sgd(0.1))
        for _ in range(2):
            state, _ = step(state, x)
            state = state if within else follow(state)
        assert all(
            a.addressable_shards[0].data.size == WIDTH * WIDTH // 8 for a in jax.tree.leaves(state.params) if a.ndim > 1
        )
        found = [np.asarray(v[...]) for v in variables(state.model())]
    for one, wanted in zip(found, by_flax(x, loss, Twins.follow if not within else lambda _: None), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=0, atol=1e-12)


class Counting(nnx.Module):
    """Scales by what an earlier call has left, in one of several ways."""

    def __init__(self, rngs, way):
        self.linear, self.calls, self.length, self.way = nnx.Linear(WIDTH, WIDTH, rngs=rngs), 0, 0, way

    def __call__(self, x):
        self.length = x.shape[0]
        if self.way == "calls":
            self.calls += 1
        if self.way == "mean":
            self.mean = nnx.BatchStat(x.mean(0))
        if self.way == "sown":
            self.sow(nnx.Intermediate, "seen", x.mean())
        return self.linear(x) * self.length


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("mesh", MESHES)
def test_what_a_step_would_forget_is_refused(mesh):
    def trace(way):
        with scope(MESHES[mesh]):
            counting = functools.partial(Counting, way=way)
            sharded = lambda rngs: gtp.shard(counting(rngs), "linear", min_size=64)  # noqa: E731
            model = gtp.nn.abstract_model(counting if mesh == "no mesh" else sharded)
            state = gtp.TrainState.create(model, optax.sgd(0.1))
            loss = lambda model, x: jnp.mean(model(x))  # noqa: E731
            jax.eval_shape(gtp.train_step(loss, optax.sgd(0.1)), state, jnp.ones((16, WIDTH)))

    for way in ("nothing", "sown"):
        trace(way)
    for way, message in (("calls", "attribute calls number __init__"), ("mean", "BatchStat mean nnx.Variable")):
        with pytest.raises(ValueError, match=naming(message)):
            trace(way)
