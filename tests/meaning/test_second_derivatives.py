"""A gradient can be differentiated again: of a gradient penalty, the gradient is that of the code, or it is refused.

The losses here are of plain code in three parts: a mean square, a penalty on the gradient with respect to the input,
and one on the gradient with respect to the parameters. The oracles are plain JAX, and finite differences.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from placed import placed
from selection import pairwise

import gtp_jax as gtp

from .test_transformations import BATCH, LENGTH, MODELS, WIDTH
from .test_transformations import in_plain_jax as residual

MESHES = {"one": {"gtp": 1}, "gtp4": {"gtp": 4}, "gtp2tp2": {"gtp": 2, "tp": 2}, "dp2gtp2": {"dp": 2, "gtp": 2}}
RECIPES = {"none": None, "fp8": gtp.FP8(), "mxfp8": gtp.MXFP8(), "nvfp4": gtp.NVFP4()}


def exact_weights(recipe: str) -> np.ndarray:
    """Returns two matrices that a recipe's format holds exactly: so what is straight through is what is plain."""
    rng = np.random.default_rng(0)
    weights = rng.choice([0, 0.5, 1, 1.5, 2, 3, 4], (2, WIDTH, WIDTH)) * rng.choice([-1, 1], (2, WIDTH, WIDTH))
    row, col = np.indices((WIDTH, WIDTH))
    amax = 7 if recipe == "fp8" else 6  # of every block of 16: a power of two times the largest code
    return np.where((row + col) % 16 == 0, amax, weights).astype(np.float32) / 64


def filled(make, values):
    """A model of arrays by path, where the mesh in scope has them: `gtp.init` would compile draws of other values."""
    model = gtp.nn.abstract_model(make)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        variable.set_value(jax.device_put(values[path], variable.get_raw_value().sharding))
    return model


def of_weights(kind, weights, **options):
    in_stack = {("stack", "layers", "dense", "kernel"): weights}
    in_list = {("layers", i, "kernel"): weights[i] for i in range(2)}
    return filled(lambda rngs: MODELS[kind](rngs, **options), in_stack if kind == "stack" else in_list)


def three_parts(call, params, x, *, terms):
    """The loss: `call(params, x)` is the model; `terms` names its terms."""

    def mean(params, x):
        return jnp.mean(jnp.sin(call(params, x).astype(x.dtype)))

    total = jnp.mean(call(params, x).astype(x.dtype) ** 2) if "value" in terms else 0.0
    if "x" in terms:
        total += 30 * jnp.sum(jax.grad(mean, argnums=1)(params, x) ** 2)
    if "params" in terms:
        found = jax.tree.leaves(jax.grad(mean)(params, x))
        total += sum(jnp.sum(g.astype(x.dtype) ** 2) for g in found)
    return total


def loss_of(terms):
    def loss(model, batch):
        graph, params, others = nnx.split(model, nnx.Param, ...)
        return three_parts(lambda params, x: nnx.merge(graph, params, others)(x), params, batch["x"], terms=terms)

    return loss


@functools.partial(jax.jit, static_argnames="terms")
def in_plain_jax(weights, x, terms):
    return jax.grad(lambda weights: three_parts(residual, weights, x, terms=terms))(weights)


def gradients_of(model, loss, batch, how, recipe):
    """Returns the gradients of the parameters, as a list."""
    if how == "jit":
        return jax.tree.leaves(nnx.jit(lambda model, batch: nnx.grad(loss)(model, batch))(model, batch))
    optimizer = optax.sgd(1.0)
    state = gtp.TrainState.create(model, optimizer)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]
    after, _ = gtp.train_step(loss, optimizer, recipe=recipe)(state, batch)
    return [a - np.asarray(b) for a, b in zip(before, jax.tree.leaves(after.params), strict=True)]


HOW = ["none, jit", "none, step", "nvfp4, step", "fp8, step", "mxfp8, step"]


@pytest.mark.parametrize(
    ("how", "mesh", "dtype", "kind"),
    pairwise(HOW, ["gtp2tp2", "gtp4", "dp2gtp2", "one"], ["bfloat16", "float32"], ["list", "stack"], usual=4),
)
def test_the_gradient_of_a_penalty_is_that_of_plain_jax(how, mesh, dtype, kind):
    recipe, how = how.split(", ")
    weights = exact_weights(recipe)
    # XLA's CPU backend has no product of bfloat16 into float32 of the form that the others need on one device
    terms = ("x",) if (dtype, mesh) == ("bfloat16", "one") else ("value", "x", "params")
    x = np.random.default_rng(1).normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)
    wanted = np.asarray(in_plain_jax(jnp.asarray(weights), jnp.asarray(x), terms))
    sizes = MESHES[mesh]
    with jax.set_mesh(gtp.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])):
        model = of_weights(kind, weights, dtype=dtype)
        found = gradients_of(model, loss_of(terms), {"x": jnp.asarray(x)}, how, RECIPES[recipe])
    found = np.concatenate([np.reshape(g, (-1, WIDTH, WIDTH)) for g in found])
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert error < {"float32": 1e-5, "bfloat16": 2e-2}[dtype]


class Everything(nnx.Module):
    """A layer of each kind that gathers weights, of which an `MLP` has those of `up` and `down`."""

    def __init__(self, rngs, dtype):
        width, vocab = 16, 32
        given: dict[str, Any] = dict(rngs=rngs, dtype=dtype, param_dtype="float64")
        self.embed = gtp.Embed(vocab, width, **given)
        self.attention = gtp.Attention(width, num_heads=4, num_kv_heads=2, head_dim=4, **given)
        self.up, self.down = gtp.nn.LayerNormDense(width, 32, **given), gtp.Dense(32, width, parallel="row", **given)
        self.conv = gtp.nn.Conv(width, width, (3,), **given)
        self.einsum = gtp.nn.Einsum("bsd,df->bsf", (width, width), **given)
        self.moe = gtp.nn.MoE(width, 16, num_experts=4, top_k=2, aux_loss_coeff=0, **given)
        self.own = gtp.Param(jax.random.normal(rngs.params(), (width, width), "float64") / 4, dtype=dtype)
        self.head = gtp.nn.TiedHead(self.embed, param_dtype="float64", rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x)
        x = x + self.down(jax.nn.gelu(self.up(x)))
        x = x + self.moe(x)
        x = self.einsum(jnp.tanh(self.conv(x)))
        return self.head(jnp.tanh(x @ self.own.gather().astype(x.dtype)) + x)


def mean_token_loss(graph, params, others, batch):
    total, count = gtp.cross_entropy(nnx.merge(graph, params, others)(batch["tokens"]), batch["targets"])
    return total / count


def penalized_token_loss(model, batch):
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def mean(params):
        return mean_token_loss(graph, params, others, batch)

    value, gradients = jax.value_and_grad(mean)(params)
    return value + sum(jnp.sum(g.astype("float64") ** 2) for g in jax.tree.leaves(gradients))


@pytest.mark.full
def test_a_penalty_through_every_layer_has_the_gradient_of_finite_differences(x64):
    rng = np.random.default_rng(4)
    tokens = jnp.asarray(rng.integers(0, 32, (2, 4, 8)))
    batch = {"tokens": tokens[0], "targets": tokens[1]}
    plain = Everything(nnx.Rngs(0), "float64")
    graph, params, others = nnx.split(plain, nnx.Param, ...)
    along = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), params)

    def moved(by):
        return penalized_token_loss(
            nnx.merge(graph, jax.tree.map(lambda a, d: a + by * d, params, along), others), batch
        )

    up, down = jax.jit(jax.vmap(moved))(jnp.asarray([2e-7, -2e-7]))
    slope = float(up - down) / 4e-7  # of which the error is 1e-7 of it
    with jax.set_mesh(gtp.make_mesh(gtp=2, tp=2, devices=jax.devices()[:4])):
        values = {path: variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(plain))}
        for dtype, tolerance in (("float64", 1e-6), ("bfloat16", 0.05)):
            model = filled(lambda rngs, dtype=dtype: Everything(rngs, dtype), values)
            found = gradients_of(model, penalized_token_loss, batch, "jit", None)
            there = sum(np.vdot(g, d) for g, d in zip(found, jax.tree.leaves(along), strict=True))
            assert abs(there - slope) < tolerance * abs(slope), dtype


def test_the_gradient_through_every_layer_is_differentiated_forward_and_that_again_in_reverse(x64):
    """Traced alone: compiled, it would take half a minute. Values are compared below."""
    tokens = jnp.zeros((4, 8), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    with jax.set_mesh(gtp.make_mesh(gtp=2, tp=2, devices=jax.devices()[:4])):
        model = gtp.nn.abstract_model(lambda rngs: Everything(rngs, "float64"))
        graph, params, others = nnx.split(model, nnx.Param, ...)
        gradient = jax.grad(lambda params: mean_token_loss(graph, params, others, batch))

        def curvature(params, along):
            moved = jax.jvp(gradient, (params,), (along,))[1]
            return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(along), strict=True))

        found = jax.eval_shape(jax.grad(curvature), params, params)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize(
    ("terms", "recipe"),
    pairwise(["x", "params"], [gtp.FP8(matmuls=True), gtp.NVFP4(matmuls=True, stochastic=False)], usual=1),
)
def test_products_of_rounded_operands_refuse_a_second_derivative(recipe, terms):
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        for kind in MODELS.values():
            state = gtp.TrainState.create(gtp.nn.abstract_model(kind), optax.sgd(1.0))
            step = gtp.train_step(loss_of((terms,)), optax.sgd(1.0), recipe=recipe)
            batch = {"x": jnp.ones((BATCH, LENGTH, WIDTH))}
            with pytest.raises(TypeError, match=naming("differentiated again `matmuls=True`")):
                step.trace(state, batch)


@pytest.mark.parametrize(("kind", "order"), pairwise(["stack", "list"], ["jvp", "vjp"], usual=1))
def test_a_gradient_is_differentiated_forward_too(kind, order):
    """The product of a vector and the Hessian with respect to the parameters, by both modes."""
    weights = exact_weights("none")
    x = jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, LENGTH, WIDTH)), "float32")
    along = np.random.default_rng(2).normal(size=weights.shape).astype(np.float32)

    def product(gradient, params, along):
        if order == "jvp":
            return jax.jvp(gradient, (params,), (along,))[1]
        return jax.vjp(gradient, params)[1](along)[0]

    def of(call):
        return jax.grad(lambda params: jnp.sum(jnp.sin(call(params).astype("float32"))))

    plain = of(lambda w: residual(w, x))
    wanted = np.asarray(jax.jit(lambda *given: product(plain, *given))(jnp.asarray(weights), jnp.asarray(along)))
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        graph, params = nnx.split(of_weights(kind, weights))
        moved = nnx.state(of_weights(kind, along))
        gradient = of(lambda params: nnx.merge(graph, params)(x))
        found = jax.jit(lambda params, along: product(gradient, params, along))(params, moved)
    found = np.concatenate([np.reshape(g, (-1, WIDTH, WIDTH)) for g in jax.tree.leaves(found)])
    assert np.linalg.norm(found - wanted) < 2e-2 * np.linalg.norm(wanted)


class Pair(nnx.Module):
    def __init__(self, rngs):
        given: dict[str, Any] = dict(rngs=rngs, dtype="float64", param_dtype="float64")
        self.up, self.down = gtp.Dense(4, 2, parallel="column", **given), gtp.Dense(2, 4, parallel="row", **given)

    def __call__(self, x):
        return x + self.down(jnp.sin(self.up(x)))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["list", "stack"])
def test_derivatives_through_a_sequence_that_moves_in_parts_are_those_of_plain_jax(kind, x64):
    """Of forward over reverse (`jax.hessian`), of reverse over that, and of reverse over reverse."""
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=8)), jnp.asarray(rng.normal(size=8))
    x, along = jnp.asarray(rng.normal(size=(2, 4, 4))), jnp.asarray(rng.normal(size=(16, 16)))

    terms = ("value", "x", "params")

    def kernels(flat):
        return jnp.reshape(flat[:8], (4, 2)), jnp.reshape(flat[8:], (2, 4))

    def derivatives(call):
        def value(flat):
            return jnp.sum(jnp.cos(call(*kernels(flat), x)))

        def both(flat):
            hessian = jax.hessian(value)
            penalized = functools.partial(three_parts, lambda flat, x: call(*kernels(flat), x), terms=terms)
            third = jax.grad(lambda flat: jnp.vdot(hessian(flat), along))
            return hessian(flat), third(flat), jax.grad(penalized)(flat, x)

        return [np.asarray(a) for a in jax.jit(both)(jnp.concatenate(weights))]

    wanted = derivatives(lambda up, down, x: x + jnp.sin(x @ up) @ down)
    with jax.set_mesh(gtp.make_mesh(gtp=2, tp=2, devices=jax.devices()[:4])):
        model = placed(lambda rngs: gtp.Stack(Pair, 1, rngs=rngs) if kind == "stack" else Pair(rngs))
        graph, state = nnx.split(model)
        lead, structure = (1,) if kind == "stack" else (), jax.tree.structure(state)

        def call(up, down, x):
            put = [jnp.reshape(kernel, (*lead, *kernel.shape)) for kernel in (down, up)]
            return nnx.merge(graph, jax.tree.unflatten(structure, put))(x)

        found = derivatives(call)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.full
def test_experts_that_multiply_in_several_rounds_are_differentiated_forward_over_reverse(x64):
    x, along = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4, 8)))

    def product(**degrees):
        def layer(rngs):
            options: dict[str, Any] = dict(round_size=0.3, aux_loss_coeff=0, dtype="float64", param_dtype="float64")
            return gtp.nn.MoE(8, 8, num_experts=4, top_k=2, rngs=rngs, **options)

        with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: sum(degrees.values())])):
            graph, state = nnx.split(placed(layer))
            gradient = jax.grad(lambda state, x: jnp.sum(jnp.sin(nnx.merge(graph, state)(x))), (0, 1))
            found = jax.jit(lambda *given: jax.jvp(gradient, *given))((state, x), (state, along))[1]
            return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]

    for a, b in zip(product(ep=2), product(gtp=1), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
