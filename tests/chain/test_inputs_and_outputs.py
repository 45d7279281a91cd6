"""What goes into the layers of a chain and what comes out, stages made by hand: values, gradients, what is saved."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from selection import pairwise

import gtp_jax as gtp
from gtp_jax.chain import REMAT, Outputs, Schedule, Stage, run

from .stages import AXIS, FEATURES, arrays, plain, recorded, shared_inputs, stage

LENGTH = 5
ROWS = 4


def on_one_device(function):
    mesh = jax.make_mesh((1,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


EVERY = pairwise(sorted(REMAT), [1, "full"], [True, False], usual=1)


@pytest.mark.parametrize("remat, unroll, prefetch", EVERY)
def test_outputs_gradients_and_values_from_backward_are_those_of_a_loop(remat, unroll, prefetch, x64):
    weights, params, constants = arrays(LENGTH)
    shared, x = shared_inputs(ROWS), jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, FEATURES)))
    coefficients = jnp.arange(1.0, LENGTH + 1)

    def result(chained, weights, params, x, bias):
        given = {"mask": shared["mask"], "bias": bias}
        if chained:
            schedule = Schedule(unroll=unroll, prefetch=prefetch)
            y, (outputs,) = run([stage(weights, params, constants, remat)], x, schedule, given)
        else:
            y, outputs = plain(weights, params, x, given, constants)
        # scalars are one a layer, so that each may have a weight of its own
        return jnp.sum(y**2) + jnp.sum(outputs.scalars["balance"] * coefficients), outputs

    def everything(chained):
        function = jax.value_and_grad(lambda *a: result(chained, *a), argnums=(0, 1, 2, 3), has_aux=True)
        return on_one_device(function)(weights, params, x, shared["bias"])

    found, wanted = everything(True), everything(False)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype, path
        assert np.linalg.norm(one - other) <= 1e-12 * max(1, np.linalg.norm(other)), path
    # the history that backward emits: a new entry ahead of the older ones, in each layer
    history = found[1][1]["history"]
    np.testing.assert_array_equal(history[:, 1:], params["history"][:, :-1])
    assert (np.asarray(history[:, 0]) > 0).all() and len(set(history[:, 0].tolist())) == LENGTH


@pytest.mark.parametrize("keep_gathered", [0, pytest.param("all", marks=pytest.mark.full)])
def test_gradients_of_weights_cut_from_padded_ones_are_those_of_a_loop(keep_gathered, x64):
    weights, params, constants = arrays(LENGTH)
    given, x = shared_inputs(ROWS), jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, FEATURES)))

    def chained(weights, x):
        exact = stage(weights, params, constants)
        padded = dataclasses.replace(
            exact,
            gather=lambda *parts: jax.tree.map(lambda w: jnp.pad(w, ((0, 3), (0, 0))), exact.gather(*parts)),
            cut=lambda whole: jax.tree.map(lambda w: w[:FEATURES], whole),
        )
        return jnp.sum(run([padded], x, Schedule(keep_gathered=keep_gathered), given)[0] ** 2)

    looped = lambda weights, x: jnp.sum(plain(weights, params, x, given, constants)[0] ** 2)  # noqa: E731
    found, wanted = (on_one_device(jax.grad(function, argnums=(0, 1)))(weights, x) for function in (chained, looped))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("unroll", ["full", 1])
def test_gradients_of_shared_floats_are_summed_in_float32(unroll):
    # from either end, the sum of gradients in bfloat16 passes 256 midway and then stays, as 1 is half of its spacing
    each = jnp.asarray([1] * 8 + [256] + [1] * 8, jnp.bfloat16)

    def apply(weights, slots, params, x, shared, constants, turn):
        return x + params * shared, Outputs()

    layers = Stage((), (), each, lambda _, one, prepared: one, lambda found: (), apply, 17, True, takes_shared=True)
    total = lambda shared: run([layers], jnp.zeros(()), Schedule(unroll=unroll), shared)[0]  # noqa: E731
    gradient = jax.grad(lambda shared: total(shared).astype(jnp.float32))(jnp.zeros((), jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16 and gradient == 272


class Reads(nnx.Module):
    """A layer that uses shared inputs in ways of which backward needs them."""

    def __init__(self, rngs):
        self.dense = gtp.Dense(8, 8, rngs=rngs, dtype=jnp.float32)

    def __call__(self, x, positions, mask, memory):
        h = jnp.where(mask, self.dense(x), 0) * positions
        return x + jnp.tanh(h) * jnp.sum(memory * memory, axis=1, keepdims=True)


@pytest.mark.parametrize("remat, unroll", pairwise(sorted(REMAT), ["full", 1]))
def test_no_shared_input_is_saved_with_a_layer(remat, unroll):
    schedule = Schedule(unroll=unroll)
    make = lambda rngs: gtp.Stack(lambda rngs: Reads(rngs), 6, schedule=schedule, remat=remat, rngs=rngs)  # noqa: E731
    graph, state = nnx.split(gtp.nn.abstract_model(make))
    x = jax.ShapeDtypeStruct((2, 3, 8), jnp.float32)
    shared = {
        "positions": jax.ShapeDtypeStruct((2, 3, 8), jnp.int32),
        "mask": jax.ShapeDtypeStruct((2, 3, 8), jnp.bool_),
        "memory": jax.ShapeDtypeStruct((2, 5, 8), jnp.float32),
    }
    saved = []

    def call(state, x, positions, mask, memory):
        run = lambda state, x, memory: nnx.merge(graph, state)(x, positions, mask, memory)  # noqa: E731
        y, backward = jax.vjp(run, state, x, memory)
        saved.extend((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(backward))
        return y

    jax.eval_shape(call, state, x, **shared)
    for name, one in shared.items():
        alike = [shape for shape, dtype in saved if dtype == one.dtype and shape[-len(one.shape) :] == one.shape]
        assert alike == [one.shape], (name, alike)  # once for the whole chain
    activations = [shape for shape, dtype in saved if dtype == x.dtype and shape[-3:] == x.shape]
    assert sum(shape[0] if len(shape) == 4 else 1 for shape in activations) >= 6  # what the test would see


class History(nnx.Variable):
    """Of the largest gradients; backward writes it by way of its gradient."""


class Records(nnx.Module):
    def __init__(self, rngs):
        self.dense = gtp.Dense(8, 8, rngs=rngs, dtype=jnp.float32)
        self.history = History(jnp.zeros(2))

    def __call__(self, x):
        return x + jnp.tanh(recorded(self.dense(x), self.history.get_value()))


@pytest.mark.parametrize("remat", ["everything", pytest.param("nothing", marks=pytest.mark.full)])
def test_a_variable_takes_values_from_backward(remat):
    stack = nnx.jit(lambda: gtp.Stack(lambda rngs: Records(rngs), 3, remat=remat, rngs=nnx.Rngs(0)))()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)
    grad = nnx.grad(lambda stack: jnp.sum(stack(x) ** 2), argnums=nnx.DiffState(0, History))
    gradient = nnx.jit(grad)(stack)
    emitted = gradient["layers"]["history"].get_value()

    # the same gradients, of the layers' products one by one
    kernels = stack.layers.dense.kernel.get_value()

    def loss(added):
        y = x
        for kernel, more in zip(kernels, added, strict=True):
            y = y + jnp.tanh(y @ kernel + more)
        return jnp.sum(y**2)

    wanted = np.abs(jax.jit(jax.grad(loss))(np.zeros((3, 4, 8), np.float32))).max(axis=(1, 2))
    np.testing.assert_allclose(emitted[:, 0], wanted, rtol=1e-5)
    np.testing.assert_array_equal(emitted[:, 1], 0)
