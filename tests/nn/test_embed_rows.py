"""An `Embed` sends the rows of all ranks' tokens, instead of its table, where that takes fewer bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from selection import every, pairwise

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.nn import run_chain

from .arrays import assert_close, mesh_in_scope

ROWS, WIDTH = 256, 16
WIDE = dict(dtype=jnp.float64, param_dtype=jnp.float64)


class Alone(nnx.Module):
    """A table that is called by itself, without a chain."""

    def __init__(self, rngs):
        self.embed = gtp.Embed(ROWS, WIDTH, **WIDE, rngs=rngs)

    def __call__(self, tokens):
        return self.embed(tokens)


class Chained(nnx.Module):
    """A table at the start of a chain."""

    def __init__(self, rngs):
        self.embed = gtp.Embed(ROWS, WIDTH, **WIDE, rngs=rngs)
        self.mlp = gtp.MLP(WIDTH, 32, **WIDE, rngs=rngs)

    def __call__(self, tokens):
        return run_chain(tokens, self.embed, self.mlp)


class Tied(nnx.Module):
    """A table that a head multiplies by too: the head gathers it whole."""

    def __init__(self, rngs):
        self.embed = gtp.Embed(ROWS, WIDTH, **WIDE, rngs=rngs)
        self.head = gtp.nn.TiedHead(self.embed, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, tokens):
        return run_chain(tokens, self.embed, self.head)


MODELS = {kind.__name__: kind for kind in (Alone, Chained, Tied)}


def state_of(kind):
    model = gtp.init(lambda rngs: MODELS[kind](rngs), nnx.Rngs(0))
    return nnx.split(model)


def value_and_gradients(graph):
    def loss(state, tokens):
        return jnp.mean(jnp.sin(3 * nnx.merge(graph, state)(tokens)))

    return jax.jit(jax.value_and_grad(loss))


def sent(kind, tokens):
    """What the loss and its gradients send over gtp: (kind, dtype, bytes of the larger side)."""
    graph, state = state_of(kind)
    compiled = value_and_gradients(graph).lower(state, tokens).compile().as_text()
    found = [c for c in hlo.collectives(compiled) if "gtp" in c.axes]
    return [(c.kind, c.dtype, max(c.operand_bytes, c.result_bytes)) for c in found if c.kind != "all-reduce"]


@pytest.mark.parametrize(
    "kind, mesh, length", pairwise(MODELS, ["gtp 4 x tp 2", "gtp 8", "dp 2 x gtp 2 x tp 2"], [2, 4, 64], usual=2)
)
def test_rows_and_gradients_are_those_of_one_device(kind, mesh, length, x64):
    """Up to 4 tokens of each of 8 sequences are exchanged as rows; of 64, the table is gathered."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 9, (8, length)))  # most of them several times
    tokens = tokens.at[0, 0].set(ROWS - 1)
    graph, state = state_of(kind)
    wanted = value_and_gradients(graph)(state, tokens)
    with mesh_in_scope(mesh):
        graph, own = state_of(kind)
        places, values = jax.tree.leaves(own), map(np.asarray, jax.tree.leaves(state))
        arrays = [jax.device_put(value, place.sharding) for value, place in zip(values, places, strict=True)]
        own = jax.tree.unflatten(jax.tree.structure(own), arrays)
        assert_close(value_and_gradients(graph)(own, np.asarray(tokens)), wanted)


@pytest.mark.parametrize("rows, mesh", every(3, [(97, "dp 2 x gtp 2"), (97, "gtp 8"), (100, "gtp 8")]))
def test_rows_of_a_padded_table_are_those_of_one_device(rows, mesh, x64):
    """The padding of 97 and 100 rows over 8 ranks is more than one row, and that of 97 over 2 ranks changes no shape
    when it is left out of each rank's share."""

    class Narrow(nnx.Module):
        def __init__(self, rngs):
            self.embed = gtp.Embed(rows, 11, **WIDE, rngs=rngs)

        def __call__(self, tokens):
            return self.embed(tokens)

    def after_a_step():
        state = gtp.TrainState.create(gtp.init(Narrow, nnx.Rngs(0)), optax.sgd(1.0))
        step = gtp.train_step(lambda model, tokens: jnp.sum(jnp.sin(9 * model(tokens))), optax.sgd(1.0))
        state, metrics = step(state, tokens)
        return state.model_def.padded, (metrics["loss"], jax.tree.map(np.asarray, state.logical().params))

    tokens = jnp.asarray(np.random.default_rng(0).integers(0, rows, (8, 2))).at[0].set(rows - 1)
    _, wanted = after_a_step()
    with mesh_in_scope(mesh), gtp.layout.even_shares():
        padded, found = after_a_step()
    assert padded
    assert_close(found, wanted)


def test_bytes_are_those_of_rows_until_ranks_times_tokens_reach_the_vocabulary(x64):
    """Eight ranks: 31 tokens on each make 248 rows, fewer than the 256 of the table; 32 make as many."""
    with mesh_in_scope("gtp 8"):
        rows = 8 * 31 * WIDTH * 8
        few = sent("Alone", jnp.zeros((8, 31), jnp.int32))
        ids = [("all-gather", "s32", 8 * 31 * 4)] * (len(few) - 2)
        assert ids and sorted(few) == [("all-gather", "f64", rows), *ids, ("reduce-scatter", "f64", rows)]
        table = ROWS * WIDTH * 8
        many = sent("Alone", jnp.zeros((8, 32), jnp.int32))
        assert {(kind, size) for kind, _, size in many} == {("all-gather", table), ("reduce-scatter", table)}


def test_a_tied_head_still_gathers_the_table(x64):
    with mesh_in_scope("gtp 8"):
        found = sent("Tied", jnp.zeros((8, 2), jnp.int32))
    whole = [kind for kind, _, size in found if size == ROWS * WIDTH * 8]
    assert "reduce-scatter" in whole and whole.count("reduce-scatter") == 1
    assert ("reduce-scatter", "f64", 8 * 2 * WIDTH * 8) in found


def test_quantized_tables_are_gathered(x64):
    """Codes of a table travel as before: rows that are sent in its dtype would have other values."""
    with mesh_in_scope("gtp 8"):
        embed = gtp.init(lambda rngs: gtp.Embed(ROWS, 64, rngs=rngs), nnx.Rngs(0))
        step = jax.jit(lambda tokens: embed(tokens))
        with gtp.use_recipe(gtp.MXFP8(exclude=())):
            text = step.lower(jnp.zeros((8, 2), jnp.int32)).compile().as_text()
    (codes,) = [c for c in hlo.collectives(text) if c.kind == "all-gather" and c.result_bytes >= ROWS * 64]
    assert codes.dtype == "u8"
