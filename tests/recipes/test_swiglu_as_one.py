"""A gated MLP of a model in FP8 runs as one operation where it can, and results are those of its layers bit for bit."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from placed import placed
from selection import others_full

import gtp_jax as gtp
from gtp_jax.chain import REMAT
from gtp_jax.nn import _mlp

FP8 = gtp.FP8(matmuls=True)
SIZES: dict[str, Any] = dict(features=64, hidden=128)


def silu(x):
    """Another function than `jax.nn.silu`, so that the layers run one after another."""
    return jax.nn.silu(x)


def loss(model, x):
    return jnp.sum(jnp.sin(model(x)).astype(jnp.float32)), jnp.float32(x.size)


def stack(rngs, activation):
    return gtp.Stack(lambda rngs: gtp.MLP(**SIZES, activation=activation, rngs=rngs), 2, rngs=rngs)


def alone(rngs, activation):
    return gtp.MLP(**SIZES, activation=activation, rngs=rngs)


class Calls:
    """Counts the calls of the operation while programs are traced."""

    def __init__(self, monkeypatch):
        self.count, run = 0, _mlp.swiglu_fp8

        def counted(*args, **kwargs):
            self.count += 1
            return run(*args, **kwargs)

        monkeypatch.setattr(_mlp, "swiglu_fp8", counted)


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


def trained(make, activation, degrees, view, recipe=FP8, remat=None):
    x = np.random.default_rng(1).normal(size=(8, 16, 64)).astype(np.float32)
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])):
        model = placed(lambda rngs: make(rngs, activation))
        if remat is not None:
            model.remat = remat
        state = gtp.TrainState.create(model, optax.identity())
        run = jax.jit(lambda s: gtp.train.loss_and_gradients(loss, s, x, recipe=recipe, view=view))
        return jax.tree.map(np.asarray, run(state))


KEPT = gtp.FP8(matmuls=True, gradient="e4m3", keep_codes=True)
CASES = [
    (stack, dict(gtp=2), "local", FP8, "matmuls"),
    (alone, dict(gtp=2), "global", KEPT, None),
    (stack, dict(gtp=1), "global", KEPT, "nothing"),
    (alone, dict(gtp=1), "local", FP8, None),
    *((stack, dict(gtp=2), "global", KEPT, remat) for remat in REMAT),
]


@pytest.mark.parametrize("make, degrees, view, recipe, remat", others_full(CASES, CASES[:1]))
def test_loss_and_gradients_are_those_of_the_layers_one_after_another(make, degrees, view, recipe, remat, calls):
    found = trained(make, jax.nn.silu, degrees, view, recipe, remat)
    assert calls.count
    before = calls.count
    wanted = trained(make, silu, degrees, view, recipe, remat)
    assert calls.count == before
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(found))


# What does not run as one operation: the arguments of the MLP, the recipe, and the mesh.
APART: dict[str, Any] = {
    "a bias": (dict(use_bias=True), FP8, {}),
    "another activation": (dict(activation=jax.nn.gelu), FP8, {}),
    "no gate": (dict(gated=False), FP8, {}),
    "float64": (dict(dtype=jnp.float64, param_dtype=jnp.float64), FP8, {}),
    "no recipe": ({}, None, {}),
    "codes on the wire alone": ({}, gtp.FP8(), {}),
    "another format": ({}, gtp.MXFP8(matmuls=True), {}),
    "a layer left out": ({}, gtp.FP8(matmuls=True, exclude=("down",)), {}),
    "tensor parallelism": ({}, FP8, dict(tp=2)),
}


@pytest.mark.parametrize("case", APART)
def test_other_layers_run_one_after_another(case, calls):
    options, recipe, degrees = APART[case]
    mesh = gtp.make_mesh(gtp=1, **degrees, devices=jax.devices()[: math.prod(degrees.values())])
    with jax.set_mesh(mesh), jax.enable_x64(case == "float64"):
        model = placed(lambda rngs: gtp.MLP(**SIZES, rngs=rngs, **options))
        with gtp.use_recipe(recipe):
            assert jax.eval_shape(model, jnp.ones((2, 4, 64))).shape == (2, 4, 64)
    assert not calls.count


class _Scaled(gtp.Dense):
    def from_parts(self, parts):
        return super().from_parts(tuple(part * 2 for part in parts))


class _Squared(gtp.MLP):
    def _activated(self, hidden):
        return super()._activated(hidden) ** 2


def _with_up(*names):
    def make(rngs):
        mlp = gtp.MLP(**SIZES, rngs=rngs)
        mlp.up = gtp.nn.LayerNormDense(SIZES["features"], dict.fromkeys(names, SIZES["hidden"]), norm="rms", rngs=rngs)
        return mlp

    return make


def _with_scaled(rngs):
    mlp = gtp.MLP(**SIZES, rngs=rngs)
    mlp.down = _Scaled(SIZES["hidden"], SIZES["features"], parallel="row", rngs=rngs)
    return mlp


# MLPs of which a part is another: what it computes is not for us to know.
REPLACED = {
    "kernels in another order": _with_up("up", "gate"),
    "a third kernel": _with_up("gate", "up", "more"),
    "a subclass of a layer": _with_scaled,
    "a subclass of the MLP": lambda rngs: _Squared(**SIZES, rngs=rngs),
}


@pytest.mark.parametrize("case", REPLACED)
def test_replaced_parts_run_as_they_are(case, calls):
    with jax.set_mesh(gtp.make_mesh(gtp=1, devices=jax.devices()[:1])):
        model = placed(REPLACED[case])
        with gtp.use_recipe(FP8):
            assert jax.eval_shape(model, jnp.ones((2, 4, 64))).shape == (2, 4, 64)
    assert not calls.count


def test_an_adapter_s_layers_run_one_after_another(calls):
    with jax.set_mesh(gtp.make_mesh(gtp=1, devices=jax.devices()[:1])):
        make = lambda rngs: gtp.nn.lora(alone(rngs, jax.nn.silu), 4, 8.0, recipe=FP8, rngs=rngs)  # noqa: E731
        with gtp.use_recipe(FP8):
            assert jax.eval_shape(placed(make), jnp.ones((2, 4, 64))).shape == (2, 4, 64)
    assert not calls.count
