"""`TiedHead` is a norm and a product with the embedding's table, for any vocabulary and rank, on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import pairwise

import gtp_jax as gtp

from .arrays import assert_close, mesh_in_scope

WIDE = dict(param_dtype=jnp.float64)


class Model(nnx.Module):
    def __init__(self, norm, vocab, rngs):
        self.embed = gtp.Embed(vocab, 16, dtype=jnp.float64, **WIDE, rngs=rngs)
        self.head = gtp.nn.TiedHead(self.embed, norm=norm, **WIDE, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.embed(tokens))


class Flax(nnx.Module):
    """The same of Flax's modules."""

    def __init__(self, norm, vocab, rngs):
        self.embed = nnx.Embed(vocab, 16, **WIDE, rngs=rngs)
        kinds = {"rms": nnx.RMSNorm, "layer": functools.partial(nnx.LayerNorm, use_fast_variance=False)}
        self.norm = kinds[norm](16, epsilon=1e-6, **WIDE, rngs=rngs) if norm else lambda x: x

    def __call__(self, tokens):
        return self.embed.attend(self.norm(self.embed(tokens)))


def measured(make, table, tokens):
    """Loss and the table's gradient."""
    graph, state = nnx.split(gtp.init(make, nnx.Rngs(0)))
    name = "table" if "table" in state["embed"] else "embedding"
    state["embed"][name][...] = table

    def loss(state):
        model = nnx.merge(graph, state)
        return sum(jnp.mean(jnp.sin(30 * model(ids))) for ids in tokens)

    value, gradients = jax.jit(jax.value_and_grad(loss))(state)
    return value, gradients["embed"][name].get_value()


@pytest.mark.parametrize("norm, mesh", pairwise(["rms", "layer", None], ["gtp 4 x tp 2", "tp 3", None], usual=1))
def test_it_is_that_of_flax(norm, mesh, x64):
    rng = np.random.default_rng(0)
    table, tokens = rng.normal(size=(97, 16)), [rng.integers(0, 97, shape) for shape in ((12,), (12, 6), (12, 6, 2))]
    with mesh_in_scope(mesh):
        found = measured(lambda rngs: Model(norm, 97, rngs), table, tokens)
    assert_close(found, measured(lambda rngs: Flax(norm, 97, rngs), table, tokens))
