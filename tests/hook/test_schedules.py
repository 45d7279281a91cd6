"""Schedules of stock blocks, and activations in the host's memory: the same numbers, and only what was asked moves."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax.chain import OFFLOADED
from gtp_jax.inspect._offload import _as_on_gpus

from ..chain.programs import moves
from ..ops.test_packed_attention import equations
from .models import BATCH, DEPTH, GPT2, LENGTH, WIDTH, mean_of, tokens

MEAN = mean_of("plain")
INPUT = ((BATCH, LENGTH, WIDTH), jnp.float64)  # of a block


def differentiated(run, loss=MEAN, dropout=0.1, ranks=8, **options):
    """`run` of the function that returns loss and gradients of a GPT-2, and of its argument."""
    with jax.set_mesh(gtp.make_mesh(gtp=ranks, devices=jax.devices()[:ranks])):
        graph, state = nnx.split(gtp.shard(GPT2(nnx.Rngs(0, dropout=1), dropout), min_size=64, **options))

        def value(state):
            return loss(nnx.merge(graph, state), tokens())

        return run(jax.value_and_grad(value, allow_int=True), state)


def computed(f, state):
    found = jax.jit(f)(state)
    return [np.asarray(a) for a in jax.tree.leaves(found) if jnp.issubdtype(a.dtype, jnp.inexact)]


def traced(f, state):
    return jax.make_jaxpr(f)(state).jaxpr


@functools.cache
def on_the_device(remat):
    return differentiated(computed, remat=remat)


CASES = [("offload-matmuls", {}), ("offload", {}), ("offload", dict(prefetch=False)), ("matmuls", dict(prefetch=False))]
CASES += [("matmuls", dict(keep_gathered="all")), ("offload-matmuls", dict(keep_gathered=2)), ("offload-attention", {})]


@pytest.mark.full
@pytest.mark.parametrize("remat, schedule", CASES)
def test_gradients_are_those_of_the_same_policy_on_the_device_bit_for_bit(remat, schedule, x64):
    found = differentiated(computed, remat=remat, schedule=gtp.nn.Schedule(**schedule))
    for one, other in zip(found, on_the_device(OFFLOADED.get(remat, remat)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_input_of_every_block_moves_once_each_way_and_nothing_else(x64):
    away, back = differentiated(lambda *given: moves(traced(*given)), remat="offload")
    # without prefetching too; the head, which is last, keeps its own
    assert away == back == [INPUT] * DEPTH
    assert [away, back] == differentiated(
        lambda *given: moves(traced(*given)), remat="offload", schedule=gtp.nn.Schedule(prefetch=False)
    )


def test_outputs_of_matmuls_move_and_weights_do_not(x64):
    away, back = differentiated(lambda *given: moves(traced(*given)), remat="offload-matmuls")
    assert sorted(map(str, away)) == sorted(map(str, back))
    assert len(away) % DEPTH == 0 and len(away) > DEPTH
    assert all(shape[0] == BATCH for shape, _ in away)


class Attends(nnx.Module):
    def __init__(self, rngs):
        attend = functools.partial(gtp.nn.attention_fn, is_causal=True)
        options = dict(decode=False, attention_fn=attend, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([nnx.MultiHeadAttention(2, 128, **options) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_of_attention_in_cudnn_the_output_and_its_log_sum_exp_move_and_it_does_not_run_again():
    x = jax.ShapeDtypeStruct((BATCH, 64, 128), jnp.bfloat16)
    with jax.set_mesh(gtp.make_mesh(gtp=8)), _as_on_gpus():
        make = lambda rngs: gtp.shard(Attends(rngs), min_size=64, remat="offload-attention")  # noqa: E731
        graph, state = nnx.split(gtp.nn.abstract_model(make))
        loss = lambda state, x: jnp.sum(nnx.merge(graph, state)(x))  # noqa: E731
        made = jax.make_jaxpr(jax.grad(loss))(state, x)
    away, back = moves(made.jaxpr)
    saved = {((BATCH, 64, 2, 64), "bfloat16"): 2, ((BATCH, 2, 64), "float32"): 2}
    saved |= {((BATCH, 64, 128), "bfloat16"): 1}  # the input of the first block is the caller's
    for found in (away, back):  # the last block keeps its own
        assert Counter((shape, dtype.name) for shape, dtype in found) == saved
    names = [equation.primitive.name for equation in equations(made.jaxpr)]
    assert sum("dot_product_attention_fwd" in name for name in names) == 3


def test_what_is_not_differentiated_or_runs_in_a_scan_stays_on_the_device(x64):
    in_scan = differentiated(lambda *given: moves(traced(*given)), mean_of("scan"), 0.0, remat="offload-matmuls")
    alone = differentiated(lambda f, state: moves(traced(f.__wrapped__, state)), remat="offload")
    assert in_scan == alone == [[], []]


def gathers(jaxpr) -> int:
    """The number of gathers in a traced program."""
    return str(jaxpr).count("all_gather[")


@pytest.mark.parametrize("remat", ["nothing", "everything"])
def test_a_policy_holds_on_one_device_too_where_nothing_is_gathered(remat, x64):
    def tanhs(ranks):
        return differentiated(lambda *given: str(traced(*given)).count("tanh"), ranks=ranks, remat=remat)

    assert tanhs(1) == tanhs(8) == DEPTH * (2 if remat == "nothing" else 1)


def test_as_many_calls_as_asked_keep_their_weights_counted_from_the_end(x64):
    def count(**schedule):
        return differentiated(lambda *given: gathers(traced(*given)), schedule=gtp.nn.Schedule(**schedule))

    none, last, everything = count(keep_gathered=0), count(), count(keep_gathered="all")
    # the tied head gathers a table, and each block three kernels and two biases; backward of the lookup needs no table
    assert (none - last, last - count(keep_gathered=2), last - everything) == (1, 5, 5 * DEPTH)


def test_blocks_keep_for_backward_the_casts_that_they_sent_or_the_gathered_weights_or_nothing():
    def saved(keep_gathered):
        """The numbers of matrices in bfloat16 and in float32 that forward hands backward."""
        found = []
        with jax.set_mesh(gtp.make_mesh(gtp=8)):
            layers = [nnx.Linear(64, 64, use_bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(i)) for i in range(4)]
            schedule = gtp.nn.Schedule(keep_gathered=keep_gathered)
            graph, state = nnx.split(gtp.shard(nnx.Sequential(*layers), min_size=64, schedule=schedule))

            def call(state, x):
                y, backward = jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)
                found.extend(leaf.dtype for leaf in jax.tree.leaves(backward) if leaf.shape == (64, 64))
                return y

            jax.eval_shape(call, state, jax.ShapeDtypeStruct((16, 64), jnp.bfloat16))
        return found.count(jnp.bfloat16), found.count(jnp.float32)

    assert list(map(saved, (0, 1, "all"))) == [(0, 4), (4, 4), (4, 4)]
