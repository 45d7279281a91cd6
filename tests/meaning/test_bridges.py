"""Loss and gradients across Flax's bridge between NNX and Linen are those of plain JAX, or they are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from messages import naming
from selection import others_full, pairwise

import gtp_jax as gtp

from .test_transformations import MODELS, NUMBERS, WIDTH, error, in_plain_jax, mean, multiplied_by, values


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        yield


def everywhere(recipe: Any) -> Any:
    """Returns the recipe without patterns, as layers know no path in Linen."""
    return recipe and dataclasses.replace(recipe, exclude=())


def with_weights(tree: Any, weights: np.ndarray) -> Any:
    """Returns a tree that holds nothing but the weights of a model, with these in their place."""
    leaves, structure = jax.tree.flatten(tree)
    each = weights if len(leaves) == len(weights) else [weights]
    assert [leaf.shape for leaf in leaves] == [w.shape for w in each]
    return jax.tree.unflatten(structure, [jnp.asarray(w) for w in each])


def assert_equal(numbers: str, found: Any, gradients: Any) -> None:
    _, recipe, tolerance = NUMBERS[numbers]
    weights, x = values()
    plain = jax.jit(jax.value_and_grad(lambda w: mean(in_plain_jax(w, x))))
    wanted, of_weights = plain(multiplied_by(weights, recipe))
    assert error(found, wanted) < tolerance
    by_layer = np.concatenate([np.reshape(g, (-1, WIDTH, WIDTH)) for g in jax.tree.leaves(gradients)])
    for one, other in zip(by_layer, of_weights, strict=True):
        assert error(one, other) < tolerance


@pytest.mark.parametrize(("kind", "numbers"), pairwise(MODELS, ["nvfp4", "bfloat16", "fp8"], usual=2))
def test_a_model_in_linen_has_the_loss_and_gradients_of_plain_jax(kind, numbers):
    dtype, recipe, _ = NUMBERS[numbers]
    weights, x = values()
    x = jnp.asarray(x)
    bridged = nnx.bridge.to_linen(MODELS[kind], dtype=dtype)
    variables = with_weights(jax.jit(bridged.init)(jax.random.key(0), x), weights)
    with gtp.use_recipe(everywhere(recipe)):
        run = jax.jit(jax.value_and_grad(lambda variables: mean(bridged.apply(variables, x))))
        assert_equal(numbers, *run(variables))


def back_in_nnx(kind: str, dtype: str) -> nnx.Module:
    weights, x = values()
    bridged = nnx.bridge.ToNNX(nnx.bridge.to_linen(MODELS[kind], dtype=dtype), rngs=nnx.Rngs(0))
    model = nnx.jit(lambda model, x: model.lazy_init(x))(bridged, x)  # eager, each operation would be a program
    nnx.update(model, with_weights(nnx.state(model, nnx.Param), weights))
    return model


@pytest.mark.parametrize("kind", others_full(MODELS, ["list"]))
def test_in_a_step_it_is_right_without_a_recipe_and_refused_with_one(kind):
    x = values()[1]
    state = gtp.TrainState.create(back_in_nnx(kind, "bfloat16"), optax.identity())

    def run(recipe):
        return jax.jit(lambda s, x: gtp.train.loss_and_gradients(lambda model, x: mean(model(x)), s, x, recipe=recipe))

    assert_equal("bfloat16", *run(None)(state, x))
    with pytest.raises(ValueError, match=naming("NVFP4 ToNNX remove recipe")):
        run(gtp.NVFP4()).trace(state, x)


class Between(nnx.Module):
    """A layer of Linen between two of ours."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.last = (gtp.Dense(WIDTH, WIDTH, dtype="float32", rngs=rngs) for _ in range(2))
        self.middle = nnx.bridge.ToNNX(linen.Dense(WIDTH, use_bias=False), rngs=rngs)
        nnx.bridge.lazy_init(self.middle, jnp.zeros((1, 1, WIDTH)))

    def __call__(self, x):
        for layer in (self.first, self.middle, self.last):
            x = x + jnp.tanh(layer(x))
        return x


@pytest.mark.parametrize("recipe", [gtp.NVFP4(), pytest.param(None, marks=pytest.mark.full)], ids=["nvfp4", "none"])
def test_a_layer_of_linen_among_ours_keeps_its_values_under_a_recipe(recipe):
    (one, other), x = values()
    weights = np.stack([one, other, one.T])
    model = gtp.init(lambda rngs: Between(rngs), nnx.Rngs(0))
    for layer, w in zip((model.first, model.middle, model.last), weights, strict=True):
        layer.kernel[...] = jnp.asarray(w)
    state = gtp.TrainState.create(model, optax.identity())
    found, gradients = jax.jit(
        lambda s, x: gtp.train.loss_and_gradients(lambda model, x: mean(model(x)), s, x, recipe=recipe)
    )(state, x)
    quantized = multiplied_by(weights, recipe)
    plain = jax.jit(jax.value_and_grad(lambda w: mean(in_plain_jax(w, x))))
    wanted, of_weights = plain([quantized[0], jnp.asarray(weights[1]), quantized[2]])
    assert error(found, wanted) < 1e-5
    for name, other in zip(("first", "middle", "last"), of_weights, strict=True):
        assert error(gradients[name]["kernel"], other) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["column", None])
def test_over_tp_a_layer_in_linen_has_the_output_and_gradients_of_the_layer_in_nnx(parallel):
    sizes = dict(parallel=parallel, use_bias=True, dtype=jnp.float32)
    x = np.random.default_rng(0).normal(size=(8, 4, 56)).astype(np.float32)  # not on the two devices of the fixture
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        bridged = nnx.bridge.to_linen(gtp.Dense, 56, 120, **sizes)
        boxed = jax.jit(bridged.init)(jax.random.key(1), x)
        arrays = linen.meta.unbox({"params": boxed["params"]})
        module = gtp.init(lambda rngs: gtp.Dense(56, 120, rngs=rngs, **sizes), nnx.Rngs(0))
        module.kernel.set_value(arrays["params"]["kernel"])
        graph, state = nnx.split(module)
        is_box = lambda leaf: isinstance(leaf, linen.meta.AxisMetadata)  # noqa: E731

        def of_linen(arrays, x):
            put = lambda box, v: box.replace_boxed(v) if is_box(box) else v  # noqa: E731
            trained = {k: jax.tree.map(put, boxed[k], v, is_leaf=is_box) for k, v in arrays.items()}
            return jnp.sum(jnp.sin(bridged.apply({**boxed, **trained}, x)))

        def of_nnx(state, x):
            return jnp.sum(jnp.sin(nnx.merge(graph, state)(x)))

        found, (of_params, of_x) = jax.jit(jax.value_and_grad(of_linen, (0, 1)))(arrays, x)
        wanted, (of_state, wanted_x) = jax.jit(jax.value_and_grad(of_nnx, (0, 1)))(state, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(of_x, wanted_x, atol=1e-6)
    for name, gradient in of_params["params"].items():
        own = np.asarray(of_state[name].get_value())
        assert np.abs(own).max() > 0.1
        np.testing.assert_allclose(gradient, own, atol=1e-5)
