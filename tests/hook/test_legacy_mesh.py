"""A mesh that is in scope by `with mesh:`, as older code has it, serves as one of `jax.set_mesh`."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import gtp_jax as gtp
from gtp_jax import hlo

from .models import F64, GPT2, LENGTH, VOCAB, WIDTH
from .steps import assert_equal, train

TOKENS = np.random.default_rng(0).integers(0, VOCAB, (16, LENGTH))


@contextlib.contextmanager
def legacy(mesh):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            yield


def gpt2():
    return GPT2(nnx.Rngs(0), dropout=0.0, depth=1)


def loss(model, tokens):
    return jnp.sin(model(tokens)).mean()


def test_steps_under_with_mesh_are_those_without_a_mesh(x64):
    wanted = train(gpt2(), loss, jnp.asarray(TOKENS), steps=2)
    with legacy(gtp.make_mesh(dp=2, gtp=4)):
        model = gtp.shard(gpt2(), "blocks.*", min_size=64)
        weight = model.blocks[0].up.kernel.get_value()
        assert weight.sharding.spec != P() and weight.addressable_shards[0].data.size * 8 == weight.size
        found = train(model, loss, jnp.asarray(TOKENS), steps=2, stay=False)
    assert_equal(found, wanted)


class Few(nnx.Module):
    """Blocks of few operations, each of which is a program of its own without jit."""

    def __init__(self):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=nnx.Rngs(0), **F64)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i), **F64) for i in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.embed.attend(x)


def test_calls_and_gradients_without_jit_work_under_with_mesh(x64):
    model = Few()
    logits, gradients = model(TOKENS), nnx.grad(loss)(model, TOKENS)
    with legacy(gtp.make_mesh(gtp=8)):
        sharded = gtp.shard(Few(), "blocks.*", min_size=64)
        np.testing.assert_allclose(sharded(TOKENS), logits, atol=1e-12)
        for own, whole in zip(
            jax.tree.leaves(nnx.grad(loss)(sharded, TOKENS)), jax.tree.leaves(gradients), strict=True
        ):
            np.testing.assert_allclose(own, whole, atol=1e-12)


def test_weights_are_gathered_under_with_mesh():
    with legacy(gtp.make_mesh(gtp=8)):
        model = gtp.shard(gpt2(), "blocks.*", min_size=64)
        graph, state = nnx.split(model)
        program = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, TOKENS).compile().as_text()
    assert sum(c.times for c in hlo.collectives(program) if c.kind == "all-gather") >= 4


def test_another_mesh_by_with_mesh_is_refused():
    with legacy(gtp.make_mesh(gtp=8)):
        model = gtp.shard(gpt2(), "blocks.*", min_size=64)
    with legacy(gtp.make_mesh(dp=2, gtp=4)):
        with pytest.raises(ValueError, match="was sharded by `gtp_jax.shard` over gtp 8"):
            model(TOKENS)
