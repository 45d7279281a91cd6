"""Activations in the host's memory between the passes: the same numbers, and only activations move."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from placed import placed
from selection import others_full

import gtp_jax as gtp
from gtp_jax.chain import OFFLOADED
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

from .loops import inputs, loss, make_stack, results
from .programs import moves

LAYERS, BATCH, SEQ, HIDDEN = 3, 8, 16, 32
SIZES = dict(
    vocab_size=64, hidden_size=HIDDEN, num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48
)
# of one rank of gtp 4 x tp 2, between layers
INPUT = (BATCH // 4, SEQ // 2, HIDDEN)


def differentiated(config: LlamaConfig, run):
    """`run` of the function that returns loss and gradients in local view on gtp 4 x tp 2, and of its arguments."""
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        model = placed(lambda rngs: Llama(config, rngs=rngs))
        state = gtp.TrainState.create(model, optax.sgd(0.1))
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (BATCH, SEQ + 1)).astype(np.int32)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        return run(lambda s, b: gtp.train.loss_and_gradients(next_token_loss, s, b, view="local"), state, batch)


@functools.cache
def on_the_device(remat):
    return jax.tree.leaves(differentiated(LlamaConfig(**SIZES, remat=remat), lambda f, *given: jax.jit(f)(*given)))


SCHEDULES = [("full", True, "auto"), ("full", False, 1), (1, True, 1), (2, True, 1), (1, True, "all")]
CASES = [(remat, *schedule) for remat in OFFLOADED for schedule in SCHEDULES]


@pytest.mark.parametrize(
    "remat, unroll, prefetch, keep_gathered", others_full(CASES, [("offload-matmuls", 1, True, 1)])
)
def test_gradients_are_those_without_bit_for_bit(remat, unroll, prefetch, keep_gathered):
    config = LlamaConfig(**SIZES, remat=remat, unroll=unroll, prefetch=prefetch, keep_gathered=keep_gathered)
    found = jax.tree.leaves(differentiated(config, lambda f, *given: jax.jit(f)(*given)))
    for one, other in zip(found, on_the_device(OFFLOADED[remat]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.full
@pytest.mark.parametrize("remat, unroll", itertools.product(OFFLOADED, ["full", 1]))
def test_layers_with_state_masks_and_dropout_compute_what_they_do_without(remat, unroll, x64):
    def of(remat):
        return results(make_stack(LAYERS, schedule=gtp.nn.Schedule(unroll=unroll), remat=remat), inputs())

    for one, other in zip(jax.tree.leaves(of(remat)), jax.tree.leaves(of(OFFLOADED[remat])), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("unroll", ["full", pytest.param(1, marks=pytest.mark.full)])
def test_the_input_of_every_layer_moves_once_each_way_and_nothing_else(unroll):
    config = LlamaConfig(**SIZES, remat="offload", unroll=unroll)
    away, back = differentiated(config, lambda f, *given: moves(jax.make_jaxpr(f)(*given).jaxpr))
    assert away == back == [(INPUT, jnp.bfloat16)] * LAYERS  # the head, which is last, keeps its own


@pytest.mark.parametrize("unroll", ["full", pytest.param(1, marks=pytest.mark.full)])
def test_outputs_of_matmuls_move_and_weights_do_not(unroll):
    config = LlamaConfig(**SIZES, remat="offload-matmuls", unroll=unroll)
    away, back = differentiated(config, lambda f, *given: moves(jax.make_jaxpr(f)(*given).jaxpr))
    assert sorted(map(str, away)) == sorted(map(str, back))
    assert len(away) % LAYERS == 0 and len(away) > LAYERS and away.count((INPUT, jnp.bfloat16)) >= LAYERS
    for shape, dtype in away:  # every one has a row per token, or a sum per head and token
        assert dtype in (jnp.bfloat16, jnp.float32) and np.prod(shape) % (BATCH // 4 * SEQ // 2) == 0, (shape, dtype)


def test_a_model_that_is_not_differentiated_moves_nothing(x64):
    stack = make_stack(LAYERS, remat="offload")
    graph, state = nnx.split(stack)
    traced = jax.make_jaxpr(lambda state: loss(nnx.merge(graph, state), *inputs()))(state)
    assert moves(traced.jaxpr) == [[], []]
