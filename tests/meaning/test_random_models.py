"""Random models of operations around and within gtp layers: on a mesh no loss and no gradient differs silently."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import gtp_jax as gtp

from .test_models_on_meshes import assert_equal, scope
from .test_operations import BATCH, DTYPES, INSIDE, LENGTH, OPERATIONS, WIDTH

MESHES = (dict(gtp=8), dict(gtp=4, tp=2), dict(dp=2, gtp=2, tp=2), dict(gtp=3), dict(tp=3), dict(dp=2, gtp=2))


class Op(nnx.Module):
    """One operation on activations, without parameters."""

    def __init__(self, name):
        self.name = name

    def __call__(self, x):
        return OPERATIONS[self.name](x)


class Pair(nnx.Module):
    """A column- and a row-parallel layer, with an operation in between."""

    def __init__(self, name, use_bias, norm, rngs):
        self.name = name
        self.up = gtp.LayerNormDense(WIDTH, 24, norm=norm, use_bias=use_bias, rngs=rngs, **DTYPES)
        self.down = gtp.Dense(24, WIDTH, parallel="row", use_bias=use_bias, rngs=rngs, **DTYPES)

    def __call__(self, x):
        return x + self.down(INSIDE[self.name](self.up(x)))


class Shortcut(nnx.Module):
    """A residual branch around a model."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, x):
        return x + jnp.tanh(self.inner(x))


class Chain(nnx.Module):
    """Models in a row."""

    def __init__(self, parts):
        self.parts = nnx.List(parts)

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x


def build(tree, rngs):
    kind, *rest = tree
    match kind:
        case "op":
            return Op(*rest)
        case "pair":
            return Pair(*rest, rngs=rngs)
        case "dense":
            return gtp.Dense(WIDTH, WIDTH, use_bias=rest[0], rngs=rngs, **DTYPES)
        case "attention":
            return gtp.Attention(WIDTH, num_heads=6, num_kv_heads=3, head_dim=2, rngs=rngs, **DTYPES)
        case "plain":
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs, dtype=jnp.float64, param_dtype=jnp.float64)
        case "norm":
            return nnx.BatchNorm(WIDTH, rngs=rngs, dtype=jnp.float64, param_dtype=jnp.float64)
        case "dropout":
            return nnx.Dropout(0.2, rngs=rngs)
        case "shortcut":
            return Shortcut(build(rest[0], rngs))
        case "chain":
            return Chain([build(one, rngs) for one in rest[0]])
        case "stack":
            return gtp.Stack(lambda rngs: build(rest[0], rngs), rest[1], remat=rest[2], rngs=rngs)
    raise AssertionError(kind)


LEAVES = st.one_of(
    st.tuples(st.just("op"), st.sampled_from(sorted(OPERATIONS))),
    st.tuples(st.just("pair"), st.sampled_from(sorted(INSIDE)), st.booleans(), st.sampled_from(["rms", "layer", None])),
    st.tuples(st.just("dense"), st.booleans()),
    st.tuples(st.just("attention")),
    st.tuples(st.just("plain")),
    st.tuples(st.just("norm")),
    st.tuples(st.just("dropout")),
)
BODIES = st.one_of(
    LEAVES,
    st.tuples(st.just("shortcut"), LEAVES),
    st.tuples(st.just("chain"), st.lists(LEAVES, min_size=1, max_size=3)),
)
STACKS = st.tuples(st.just("stack"), BODIES, st.integers(1, 2), st.sampled_from(["nothing", "matmuls", "everything"]))
MODELS = st.tuples(st.just("chain"), st.lists(st.one_of(STACKS, BODIES), min_size=1, max_size=3))


def step(tree, degrees, microbatches):
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH))
    with scope(degrees):
        model = gtp.init(lambda rngs: build(tree, rngs), nnx.Rngs(0, dropout=1))
        state = gtp.TrainState.create(model, optimizer := optax.sgd(1.0))
        loss = lambda model, x: jnp.mean(jnp.sin(model(x)))  # noqa: E731
        before = jax.tree.map(np.asarray, state.params)
        after, metrics = gtp.train_step(loss, optimizer, microbatches=microbatches)(state, jnp.asarray(x))
        moved = jax.tree.map(lambda a, b: np.asarray(a) - b, after.params, before)
        return np.asarray(metrics["loss"]), moved, jax.tree.map(np.asarray, after.model_state)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a weight of shape")
@pytest.mark.parametrize("part", range(20))  # 10 draws each, which run side by side
def test_random_models_mean_what_they_mean_without_a_mesh(part):
    seed(part)(compare)()


@settings(max_examples=10, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(tree=MODELS, degrees=st.sampled_from(MESHES), microbatches=st.sampled_from([1, 2]))
def compare(tree, degrees, microbatches):
    with jax.enable_x64(True):
        wanted = step(tree, None, microbatches)
        try:
            found = step(tree, degrees, microbatches)
        except ValueError as error:
            assert "must be a multiple of" in str(error)  # refused: a microbatch that the ranks do not divide
            return
        assert_equal(found, wanted)
