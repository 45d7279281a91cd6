"""A `Stack` with state under a mesh, in plain NNX training: what the same layers in a loop do without a mesh."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from selection import others_full, pairwise

import gtp_jax as gtp

from .loops import FEATURES, WIDE, Block, Looped, assert_close, by_path, inputs, loss

STEPS = 3
BATCH = 8


class Parallel(Block):
    """The same, with an MLP that tp shards."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.mlp = gtp.MLP(FEATURES, 16, rngs=rngs, **WIDE)

    def __call__(self, x, *shared, **named):
        return super().__call__(x + self.mlp(x), *shared, **named)


def trained(degrees, looped: bool, **options):
    """Losses of a few steps with `nnx.Optimizer`, and the variables after them."""
    mesh = gtp.make_mesh(**degrees) if degrees else None
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        make = lambda rngs: gtp.Stack(lambda rngs: Parallel(rngs), 4, rngs=rngs, **options)  # noqa: E731
        stack = gtp.init(make, nnx.Rngs(params=0, dropout=1))
        model = Looped(stack) if looped else stack
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, *arguments):
            value, gradient = nnx.value_and_grad(loss)(model, *arguments)
            optimizer.update(model, gradient)
            return value

        losses = [float(step(model, optimizer, *inputs(BATCH, seq=4))) for _ in range(STEPS)]
        return losses, by_path(model, nnx.state(model))


CASES = {
    "gtp 8": (dict(gtp=8), {}),
    "dp 2 x gtp 2 x tp 2, looped": (dict(dp=2, gtp=2, tp=2), dict(schedule=gtp.nn.Schedule(unroll=1), remat="nothing")),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_batch_statistics_and_masks_on_a_mesh_are_those_without(case, x64):
    degrees, options = CASES[case]
    wanted, plain = trained(None, looped=True)
    losses, found = trained(degrees, looped=False, **options)
    np.testing.assert_allclose(losses, wanted, rtol=1e-12)
    assert found.keys() == plain.keys()
    for path in found:
        assert_close(found[path], plain[path], path)


class Sows(nnx.Module):
    def __init__(self, rngs):
        self.dense = gtp.Dense(8, 8, rngs=rngs, dtype=jnp.float32)

    def __call__(self, x):
        y = self.dense(x)
        self.sow(nnx.Intermediate, "mean", jnp.mean(y))
        return y


@pytest.mark.full
def test_what_layers_sow_is_captured_without_and_with_a_mesh():
    x = jax.random.normal(jax.random.key(0), (8, 8))
    capture = nnx.capture(nnx.Intermediate)(lambda model, x: model(x))
    found = {}
    for name, mesh in {"plain": None, "mesh": gtp.make_mesh(gtp=8)}.items():
        with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
            stack = gtp.init(lambda rngs: gtp.Stack(lambda rngs: Sows(rngs), 3, rngs=rngs), nnx.Rngs(0))
            y, state = capture(stack, x)
            found[name] = (np.asarray(y), np.asarray(state["layers"]["mean"].get_value()[0]))
    means = found["plain"][1]
    assert means.shape == (3,)
    assert means[-1] == pytest.approx(float(np.mean(found["plain"][0])), rel=1e-6)
    for one, other in zip(found["plain"], found["mesh"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def called(model, *shape, how=lambda model, x: model(x)):
    """The shape of what a model returns; nothing is compiled."""
    graph, state = nnx.split(model)
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.eval_shape(lambda state, x: how(nnx.merge(graph, state), x), state, x).shape


class Counts(gtp.nn.Layer):
    """Written for local view, where what it writes would be one rank's."""

    def __init__(self, rngs):
        super().__init__()
        self.sequence_parallel = False
        self.dense = gtp.Dense(8, 8, rngs=rngs, dtype=jnp.float32)
        self.seen = gtp.nn.Metric(jnp.zeros(()))

    def local(self, x):
        self.seen.set_value(jnp.sum(x))
        return self.dense(x)


def test_what_a_layer_in_local_view_writes_is_refused_under_a_mesh():
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        for make in (Counts, lambda rngs: gtp.Stack(lambda rngs: Counts(rngs), 3, rngs=rngs)):
            model = gtp.nn.abstract_model(make)
            with pytest.raises(ValueError, match=naming("Counts seen, Metric rank's")):
                called(model, 8, 8)


class Scales(gtp.nn.Layer):
    """Writes a parameter of its own."""

    def __init__(self, rngs):
        super().__init__()
        self.weight, self.scale = gtp.Param(jnp.ones((8, 8))), nnx.Param(jnp.ones(8))
        self.sequence_parallel = False

    def local(self, x):
        variable = getattr(self, self.written)
        variable.set_value(jnp.full(variable.shape, 2.0))
        return x


@pytest.mark.parametrize("name", ["weight", "scale"])
def test_a_parameter_that_a_layer_in_local_view_writes_is_refused_under_a_mesh(name):
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        model = gtp.nn.abstract_model(Scales)
        model.written = name
        with pytest.raises(ValueError, match=naming(f"Scales {name}, Param rank's")):
            called(model, 8, 4, 8)


class Writes(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(8))

    def __call__(self, x):
        self.scale.set_value(self.scale.get_value() * 2)
        return x * self.scale


class Sets(nnx.Module):
    """Uses gathered weights inside `nnx.remat`, which copies them, and sets the one whose name is `written`."""

    def __init__(self, rngs):
        self.weight = gtp.Param(jnp.ones((8, 8)))
        self.dense = gtp.Dense(8, {"a": 8, "b": 8}, rngs=rngs)
        self.written = ""

    def gathered(self, x):
        return x @ self.weight.gather() + self.dense(x)["a"] * self.weight[...].sum()

    def __call__(self, x):
        y = nnx.remat(Sets.gathered)(self, x)
        if self.written:
            variable = self.weight if self.written == "weight" else self.dense.kernel[self.written[-1]]
            variable.set_value(jnp.zeros((8, 8)))
        return y


@pytest.mark.parametrize(
    "name, degrees", pairwise(["weight", "dense.kernel.a", "dense.kernel.b"], [None, dict(gtp=8)], usual=2)
)
def test_a_gathered_weight_that_a_layer_of_a_chain_sets_is_refused_and_others_are_read(degrees, name):
    ways = {"call": lambda stack, x: stack(x), "chain": lambda stack, x: gtp.nn.run_chain(x, stack)}
    with jax.set_mesh(gtp.make_mesh(**degrees)) if degrees else contextlib.nullcontext():
        stack = gtp.nn.abstract_model(lambda rngs: stack_of(Sets))
        assert called(stack, 8, 4, 8, how=ways["chain"]) == (8, 4, 8)
        stack.layers.written = name
        for how in ways.values():
            with pytest.raises(ValueError, match=naming(f"Sets parameter {name}.")):
                called(stack, 8, 4, 8, how=how)


def stack_of(layer, **options):
    return gtp.Stack(lambda rngs: layer(rngs), 2, rngs=nnx.Rngs(0), **options)


REFUSED = {
    "a parameter written": (
        ValueError,
        lambda: stack_of(Writes)(jnp.ones((2, 8))),
        "Writes parameter scale. variables",
    ),
    "rngs shared": (
        TypeError,
        lambda: stack_of(Sows)(jnp.ones((2, 8)), rngs=nnx.Rngs(0)),
        "`Stack` Rngs; array layers constructed",
    ),
    "one shared array": (
        TypeError,
        lambda: gtp.nn.run_chain(jnp.ones((2, 8)), stack_of(Sows), shared=jnp.ones(8)),
        "`shared` ArrayImpl; tuple mapping",
    ),
}


@pytest.mark.parametrize("name", others_full(REFUSED, ["a parameter written", "rngs shared"]))
def test_what_a_stack_cannot_carry_is_refused(name):
    kind, call, message = REFUSED[name]
    with pytest.raises(kind, match=naming(message)):
        call()


class Row(nnx.Module):
    """An embedding with dropout behind it, layers, and a head, called as a chain or one by one."""

    def __init__(self, rngs):
        self.embed = gtp.Embed(12, FEATURES, rngs=rngs, **WIDE)
        self.blocks = gtp.Stack(lambda rngs: Parallel(rngs), 3, rngs=rngs)
        self.head = gtp.nn.LayerNormDense(FEATURES, 12, parallel="column", rngs=rngs, **WIDE)

    def __call__(self, tokens, shared, joined):
        if joined:
            return gtp.nn.run_chain(tokens, self.embed, self.blocks, self.head, shared=shared)
        return self.head(Looped(self.blocks)(self.embed(tokens), **shared))


@pytest.mark.parametrize("degrees", [pytest.param(None, marks=pytest.mark.full), dict(dp=2, gtp=2, tp=2)], ids=str)
def test_a_row_gives_shared_inputs_to_its_stacks(degrees, x64):
    _, positions, mask, memory = inputs(BATCH, seq=4)
    shared = {"positions": positions, "mask": mask, "memory": memory}
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 12, (BATCH, 4)), jnp.int32)

    def outputs(degrees, joined):
        with jax.set_mesh(gtp.make_mesh(**degrees)) if degrees else contextlib.nullcontext():
            model = gtp.init(Row, nnx.Rngs(params=0, dropout=1))
            logits = np.asarray(nnx.jit(lambda model: model(tokens, shared, joined))(model))
            return logits, by_path(model.blocks, nnx.state(model.blocks, nnx.BatchStat))

    logits, statistics = outputs(degrees, joined=True)
    wanted, unwritten = outputs(None, joined=False)
    assert_close(logits, wanted, "logits")
    for path in statistics:  # a loop over copies writes to the copies
        assert np.linalg.norm(statistics[path] - unwritten[path]) > 0
