"""A `Stack` is a Python loop over its layers: state, dropout, auxiliary losses, shared inputs, gradients."""

import functools

import pytest
from flax import nnx
from selection import pairwise

import gtp_jax as gtp

from .loops import Looped, assert_equal, by_path, inputs, make_stack, results

LENGTH = 5
REMAT = ["matmuls", "everything", "activations", "attention", "nothing"]
EVERY = pairwise(REMAT, [2, 1, "full"], [True, False], [1, "all", 0], usual=1)


@functools.cache
def results_of_a_loop():
    return results(Looped(make_stack(LENGTH)), inputs())


@pytest.mark.parametrize("remat, unroll, prefetch, keep_gathered", EVERY)
def test_a_stack_computes_what_a_loop_over_its_layers_does(remat, unroll, prefetch, keep_gathered, x64):
    schedule = gtp.nn.Schedule(prefetch=prefetch, unroll=unroll, keep_gathered=keep_gathered)
    stack = make_stack(LENGTH, schedule=schedule, remat=remat)
    assert_equal(results(stack, inputs()), results_of_a_loop())
    # what a loop does, said once more in numbers: two calls, a mask of its own in each layer
    after = by_path(stack, nnx.state(stack))
    assert after["calls"].tolist() == [2] * LENGTH
    assert after["dropout.rngs.count"].tolist() == [2] * LENGTH
    assert len({key.tobytes() for key in after["dropout.rngs.key"]}) == LENGTH
