"""What travels between the core and replicas of unequal degree is as narrow as on one mesh, and changes no bit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nonuniform import _step, replica_dtypes_of

SIZES = dict(vocab_size=96, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48)
PLAN = dict(dp=2, tp=2, failed=(3,), batch=3)
OPTIMIZER = optax.adamw(1e-2)


def factory(grad_reduce="float32"):
    config = LlamaConfig(**SIZES, dtype="bfloat16", grad_reduce=grad_reduce)
    return functools.partial(build, config)


def build(config, rngs):
    return Llama(config, rngs=rngs)


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        tokens = rng.integers(0, SIZES["vocab_size"], (PLAN["batch"], 17)).astype(np.int32)
        yield {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def begin(make, roles=None, *, loss=next_token_loss, **options):
    """The mesh, a state and a step."""
    with gtp.mesh.use_roles(roles or gtp.mesh.Roles()):
        replicas = gtp.nonuniform.Replicas(make, gtp.nonuniform.plan_faults(**PLAN), jax.devices()[:4])
        with jax.set_mesh(replicas.core):
            state = gtp.TrainState.create(gtp.init(make, nnx.Rngs(0)), OPTIMIZER)
        return replicas.core, state, gtp.train_step(loss, OPTIMIZER, view="local", replicas=replicas, **options)


def as_stored(core, params, recipe, reduce_over_dp, *, frozen):
    """Everything travels in the dtype in which it is stored."""
    narrow = replica_dtypes_of(core, params, recipe, reduce_over_dp, frozen=frozen)
    wide = tuple(np.dtype(x.dtype) for x in jax.tree.leaves(params))
    return narrow._replace(weights=wide, gradients=wide, rounded=frozenset())


def partly_frozen(rngs):
    """The head, the embedding and the norms are trained."""
    return gtp.nn.freeze(factory()(rngs), trained=nnx.Any(*map(nnx.PathContains, ("embed", "head", "scale"))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("roles", "make"),
    [
        pytest.param(gtp.mesh.Roles(), factory(), id="divided"),
        pytest.param(gtp.mesh.Roles(optimizer=()), factory(), id="whole"),
        pytest.param(gtp.mesh.Roles(), partly_frozen, id="partly frozen"),
    ],
)
def test_rounding_weights_ahead_of_the_transfer_changes_no_bit(roles, make, monkeypatch):
    found = []
    for wires in (replica_dtypes_of, as_stored):
        monkeypatch.setattr(_step, "replica_dtypes_of", wires)
        mesh, state, step = begin(make, roles)
        losses = []
        with jax.set_mesh(mesh):
            for batch in data(2):
                state, metrics = step(state, batch)
                losses.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        found.append((losses, [np.asarray(x).tobytes() for x in jax.tree.leaves(state.params)]))
    assert found[0] == found[1]
    # and what replicas compute with is what the masters round to
    monkeypatch.setattr(_step, "replica_dtypes_of", replica_dtypes_of)
    mesh, state, step = begin(make, roles)
    with jax.set_mesh(mesh):
        for weights in step.weights(state):
            for mine, master in zip(jax.tree.leaves(weights), jax.tree.leaves(state.params), strict=True):
                np.testing.assert_array_equal(np.asarray(mine), np.asarray(master).astype(mine.dtype))


@pytest.mark.full
def test_weights_travel_in_the_dtype_in_which_they_are_multiplied_and_gradients_in_that_of_sums():
    """Bytes of one transfer of weights and one of gradients, of which the kernels are all but norms."""
    whole = gtp.mesh.Roles(optimizer=())

    def in_turn(make, roles=None, **options):
        mesh, state, step = begin(make, roles, **options)
        with jax.set_mesh(mesh):
            return {name: one.moves.bytes_in_turn for name, one in step.transfers(state)[0].items()}

    float32 = in_turn(functools.partial(build, LlamaConfig(**SIZES, dtype="float32")))
    assert float32["unfold"] - float32["fold"] < 1024  # norms, and the number of updates made
    bf16 = in_turn(factory())
    assert bf16["unfold"] == pytest.approx(float32["unfold"] / 2, rel=0.02) and bf16["fold"] == float32["fold"]
    narrow = in_turn(factory("bf16"))
    assert narrow["fold"] == float32["fold"] / 2 and narrow["unfold"] == bf16["unfold"]
    # as on one mesh: not divided over replicas, they are summed over them as they are; the sum of all microbatches too
    assert in_turn(factory("bf16"), whole)["fold"] == float32["fold"]
    # codes are made of the masters themselves
    assert in_turn(factory(), recipe=gtp.NVFP4(exclude=()))["unfold"] == float32["unfold"]


def test_a_loss_that_reads_a_rounded_array_is_refused_by_message():
    def decayed(model, batch):
        total, tokens = next_token_loss(model, batch)
        return total + jnp.sum(model.head.kernel[...] ** 2), tokens

    mesh, state, step = begin(factory(), loss=decayed)
    message = "weight replicas of unequal degree `dtype='float32'`"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=naming(message)):
        step(state, next(data(1)))
