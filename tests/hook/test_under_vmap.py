"""Under a `jax.vmap` over examples, a sharded model has the gradients of the model without a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import others_full

import gtp_jax as gtp


def of_one_example(rngs):
    """Takes one example; its layers are called in one walk."""
    layers = [nnx.Linear(16, 16, rngs=rngs, param_dtype=jnp.float64) for _ in range(3)]
    return nnx.Sequential(*[part for layer in layers for part in (layer, jnp.tanh)])


class Penalized(nnx.Module):
    """Returns its output, and a penalty that all examples share."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        return jnp.tanh(self.linear(x)), (self.linear.kernel[...] ** 2).sum()


class WithPenalties(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Penalized(rngs) for _ in range(2)])

    def __call__(self, x):
        penalties = 0.0
        for layer in self.layers:
            x, penalty = layer(x)
            penalties += 1e-2 * penalty
        return x + penalties


class Outer(nnx.Module):
    """Maps a model within it."""

    def __init__(self, rngs):
        self.inner = of_one_example(rngs)

    def __call__(self, x):
        return jax.vmap(self.inner)(x)


CALLS = {
    "vmap": lambda model, x: jax.vmap(model)(x),
    "vmap of jit": lambda model, x: jax.vmap(jax.jit(lambda x: model(x)))(x),
    "checkpoint of vmap": lambda model, x: jax.checkpoint(jax.vmap(model))(x),
    "nnx.vmap": lambda model, x: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(model, x),
    "map in batches": lambda model, x: jax.lax.map(model, x, batch_size=4),
    "vmap of vmap": lambda model, x: jax.vmap(jax.vmap(model))(x.reshape(2, 4, 16)),
    "gradient penalty": lambda model, x: jax.vmap(jax.grad(lambda x: model(x).sum()))(x),
}
CASES = [
    *((of_one_example, nnx.Linear, call) for call in CALLS),
    *((WithPenalties, "layers.*", call) for call in ("vmap", "map in batches")),
    (Outer, nnx.Linear, "called"),
]


USUAL = [CASES[0], CASES[4], CASES[7], CASES[9]]


@pytest.mark.parametrize(
    ("make", "blocks", "call"), others_full(CASES, USUAL), ids=lambda value: getattr(value, "__name__", value)
)
def test_gradients_are_those_without_a_mesh(make, blocks, call, x64, key):
    called = CALLS.get(call, lambda model, x: model(x))

    def loss(model, x):
        return (called(model, x) ** 2).mean()

    x = jax.random.normal(key, (8, 16), jnp.float64)
    value, expected = nnx.jit(nnx.value_and_grad(loss))(make(nnx.Rngs(0)), x)
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        model = gtp.shard(make(nnx.Rngs(0)), blocks, min_size=64)
        found_value, found = nnx.jit(nnx.value_and_grad(loss))(model, x)
    assert abs(found_value - value) < 1e-12
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_no_weight_is_copied_for_each_example(x64, key):
    x = jax.random.normal(key, (24, 16), jnp.float64)
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        model = gtp.shard(of_one_example(nnx.Rngs(0)), nnx.Linear, min_size=64)
        program = str(jax.make_jaxpr(lambda x: jax.vmap(model)(x))(x))
    assert "f64[24,16]" in program and "f64[24,16,16]" not in program


def test_what_examples_share_and_is_no_float_stays_shared(key):
    class Counting(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x):
            return self.linear(x), jnp.int32(7)

    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        model = gtp.shard(nnx.Sequential(Counting(nnx.Rngs(0))), Counting, min_size=64)
        _, count = jax.vmap(model, out_axes=(0, None))(jax.random.normal(key, (8, 16)))
    assert count == 7
