"""A loss may transform the model or its calls as Flax and JAX allow: loss and gradients are those of plain JAX.

The oracles multiply by the same values, or by those that the codes of a recipe stand for, and know nothing of layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from placed import placed
from selection import pairwise

import gtp_jax as gtp

from ..recipes.oracles import matrix

WIDTH, BATCH, LENGTH = 64, 4, 2
Weights = list[jax.Array]


class InList(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **options: Any):
        self.layers = nnx.List([gtp.Dense(WIDTH, WIDTH, rngs=rngs, **options) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **options: Any):
        self.dense = gtp.Dense(WIDTH, WIDTH, rngs=rngs, **options)

    def __call__(self, x):
        return x + jnp.tanh(self.dense(x))


class InStack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **options: Any):
        self.stack = gtp.Stack(lambda rngs: Block(rngs, **options), 2, rngs=rngs)

    def __call__(self, x):
        return self.stack(x)


MODELS = {"list": InList, "stack": InStack}


def in_plain_jax(weights: Weights, x: jax.Array) -> jax.Array:
    for w in weights:
        x = x + jnp.tanh(jnp.einsum("...i,io->...o", x, w))
    return x


# At module level, as functions that are jitted usually are: their caches live as long.
@nnx.jit
def jitted_with_model(model, x):
    return model(x)


@functools.partial(jax.jit, static_argnums=0)
def jitted_with_state(graph, state, x):
    return nnx.merge(graph, state)(x)


@nnx.remat
def recomputed(model, x):
    return model(x)


def mean(y: jax.Array) -> jax.Array:
    return jnp.mean(jnp.sin(y.astype(jnp.float32)))


def of_state(model: Any, function: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """Returns a function of the graph and the state of a model, and of `x`."""
    return function(*nnx.split(model), x)


def scanned(call: Callable[..., Any], x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, _: (call(x).astype(x.dtype), None), x, length=2)[0]


def noise(like: Any) -> Any:
    """What is added to each weight; alike for all, as they are of one shape but for the layers of a `Stack`."""
    added = 0.05 * jax.random.normal(jax.random.key(5), (WIDTH, WIDTH))
    return jax.tree.map(lambda w: jnp.broadcast_to(added, w.shape), like)


def noisy(graph: Any, state: Any, x: jax.Array) -> jax.Array:
    return nnx.merge(graph, jax.tree.map(jnp.add, state, noise(state)))(x)


def distance(student: jax.Array, teacher: jax.Array) -> jax.Array:
    return jnp.mean((student.astype(jnp.float32) - teacher.astype(jnp.float32)) ** 2)


def distilled(graph: Any, state: Any, x: jax.Array) -> jax.Array:
    return distance(nnx.merge(graph, state)(x), nnx.merge(graph, lax.stop_gradient(state))(2 * x))


def along(function: Callable[[Any], jax.Array], weights: Any) -> jax.Array:
    """Returns the derivative in the direction of the noise: its gradient is a product with the Hessian."""
    products = jax.tree.map(jnp.vdot, jax.grad(function)(weights), noise(weights))
    return sum(jax.tree.leaves(products), jnp.zeros(()))


class Case(NamedTuple):
    """A loss of a model, and the same of weights in plain JAX.

    Attributes:
        ours: `(model, x) -> loss`.
        plain: `(weights, x) -> loss`.
        changed: returns what becomes of a weight before it is multiplied by.
    """

    ours: Callable[[Any, jax.Array], jax.Array]
    plain: Callable[[Weights, jax.Array], jax.Array] = lambda w, x: mean(in_plain_jax(w, x))
    changed: Callable[[np.ndarray], np.ndarray] = lambda w: w


def twice(weights: Weights, x: jax.Array) -> jax.Array:
    return mean(in_plain_jax([*weights, *weights], x))


CASES = {
    "plain": Case(lambda model, x: mean(model(x))),
    "nnx.remat": Case(lambda model, x: mean(recomputed(model, x))),
    "jax.checkpoint": Case(
        lambda model, x: mean(of_state(model, jax.checkpoint(jitted_with_state.__wrapped__, static_argnums=0), x))
    ),
    "nnx.jit": Case(lambda model, x: mean(jitted_with_model(model, x))),
    "jax.jit": Case(lambda model, x: mean(of_state(model, jitted_with_state, x))),
    "scan": Case(lambda model, x: mean(scanned(model, x)), twice),
    "vmap": Case(
        lambda model, x: mean(jax.vmap(model)(jnp.stack([x, 2 * x]))),
        lambda w, x: mean(in_plain_jax(w, jnp.stack([x, 2 * x]))),
    ),
    "noise": Case(
        lambda model, x: mean(of_state(model, noisy, x)), changed=lambda w: w + np.asarray(noise(jnp.zeros_like(w)))
    ),
    "used twice": Case(lambda model, x: mean(model(model(x).astype(x.dtype))), twice),
    "Hessian": Case(
        lambda model, x: of_state(
            model, lambda graph, state, x: along(lambda state: mean(nnx.merge(graph, state)(x)), state), x
        ),
        lambda w, x: along(lambda w: mean(in_plain_jax(w, x)), w),
    ),
    "teacher and student": Case(
        lambda model, x: of_state(model, distilled, x),
        lambda w, x: distance(in_plain_jax(w, x), in_plain_jax(lax.stop_gradient(w), 2 * x)),
    ),
}

# a dtype, a recipe, and the relative error that is allowed
NUMBERS = {
    "bfloat16": ("bfloat16", None, 2e-2),
    "fp8": ("float32", gtp.FP8(), 1e-5),
    "nvfp4": ("float32", gtp.NVFP4(), 1e-5),
}


def computed(case: str, kind: str, numbers: str, weights: np.ndarray, x: np.ndarray) -> tuple[Any, Any]:
    """Returns the loss and gradients of a model with these weights."""
    dtype, recipe, _ = NUMBERS[numbers]
    model = placed(lambda rngs: MODELS[kind](rngs, dtype=dtype))
    if kind == "list":
        for layer, w in zip(model.layers, weights, strict=True):
            layer.kernel[...] = jnp.asarray(w)
    else:
        model.stack.layers.dense.kernel[...] = jnp.asarray(weights)
    state = gtp.TrainState.create(model, optax.identity())
    loss = CASES[case].ours
    run = jax.jit(lambda s, x: gtp.train.loss_and_gradients(lambda model, x: loss(model, x), s, x, recipe=recipe))
    return run(state, x)


def by_layer(kind: str, gradients: Any) -> np.ndarray:
    if kind == "list":
        return np.stack([gradients["layers"][str(i)]["kernel"] for i in range(2)])
    return np.asarray(gradients["stack"]["layers"]["dense"]["kernel"])


def values() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(2, WIDTH, WIDTH)).astype(np.float32) / 8
    return weights, rng.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)


def multiplied_by(
    weights: Iterable[np.ndarray], recipe: gtp.recipes.BF16 | gtp.FP8 | gtp.NVFP4 | None
) -> list[np.ndarray]:
    """Returns the values that a recipe's codes stand for."""
    return [w if recipe is None else matrix(w.T, recipe.wire, np.float32).T for w in weights]


def error(found: Any, wanted: Any) -> float:
    return float(np.linalg.norm(np.asarray(found) - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize(("case", "kind", "numbers"), pairwise(CASES, MODELS, NUMBERS))
def test_loss_and_gradients_are_those_of_plain_jax(case, kind, numbers):
    _, recipe, tolerance = NUMBERS[numbers]
    weights, x = values()
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        found, gradients = computed(case, kind, numbers, weights, x)
    multiplied = multiplied_by([CASES[case].changed(w) for w in weights], recipe)
    wanted, of_weights = jax.jit(jax.value_and_grad(CASES[case].plain))(multiplied, x)
    assert error(found, wanted) < tolerance
    for one, other in zip(by_layer(kind, gradients), of_weights, strict=True):
        assert error(one, other) < tolerance
