"""A mesh that is in scope by `with mesh:`, as older code has it, serves as one of `jax.set_mesh`."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from messages import naming

import gtp_jax as gtp
from gtp_jax import hlo

from .models import Few, tokens
from .steps import PLAIN, assert_equal, train, twins


@contextlib.contextmanager
def legacy(**degrees):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with gtp.make_mesh(**degrees):
            yield


def loss(model, tokens):
    return jnp.sin(model(tokens)).mean()


def test_steps_under_with_mesh_are_those_without_a_mesh(x64):
    plain, model = twins(Few)
    wanted = train(plain, loss, tokens(), 2, PLAIN)
    with legacy(dp=2, gtp=4):
        model = gtp.shard(model, "blocks.*", min_size=64)
        weight = model.blocks[0].kernel.get_value()
        assert weight.sharding.spec != P() and weight.addressable_shards[0].data.size * 8 == weight.size
        found = train(model, loss, tokens(), 2, PLAIN, stay=False)
        graph, state = nnx.split(model)
        program = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, tokens()).compile().as_text()
    assert_equal(found, wanted)
    assert sum(c.times for c in hlo.collectives(program) if c.kind == "all-gather") >= 4


def test_another_mesh_by_with_mesh_is_refused(x64):
    model, _ = twins(Few)
    with legacy(gtp=8):
        model = gtp.shard(model, "blocks.*", min_size=64)
    with legacy(dp=2, gtp=4), pytest.raises(ValueError, match=naming("`gtp_jax.shard` gtp 8")):
        model(tokens())
