"""A `Stack` is a Python loop over its layers: state, dropout, auxiliary losses, shared inputs, gradients."""

import functools
import itertools

import pytest
from flax import nnx
from selection import others_full

import gtp_jax as gtp

from .loops import Looped, assert_equal, by_path, inputs, make_stack, results

LENGTH = 5
REMAT = ["nothing", "matmuls", "activations", "everything"]
EVERY = list(itertools.product(REMAT, ["full", 1, 2], [True, False], [0, 1, "all"]))
# each policy, and each other choice at least once
BY_DEFAULT = [
    ("matmuls", 2, True, 1),
    ("everything", 1, False, "all"),
]


@functools.cache
def results_of_a_loop():
    return results(Looped(make_stack(LENGTH)), inputs())


@pytest.mark.parametrize(
    "remat, unroll, prefetch, keep_gathered",
    others_full(EVERY, BY_DEFAULT),
)
def test_a_stack_computes_what_a_loop_over_its_layers_does(remat, unroll, prefetch, keep_gathered, x64):
    schedule = gtp.Schedule(prefetch=prefetch, unroll=unroll, keep_gathered=keep_gathered)
    stack = make_stack(LENGTH, schedule=schedule, remat=remat)
    assert_equal(results(stack, inputs()), results_of_a_loop())
    # what a loop does, said once more in numbers: two calls, a mask of its own in each layer
    after = by_path(stack, nnx.state(stack))
    assert after["calls"].tolist() == [2] * LENGTH
    assert after["dropout.rngs.count"].tolist() == [2] * LENGTH
    assert len({key.tobytes() for key in after["dropout.rngs.key"]}) == LENGTH
