"""FP8 matmuls take a weight's codes as they travel: rounded once, with one scale a fused weight, and never unpacked."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from selection import others_full

import gtp_jax as gtp
from gtp_jax import native
from gtp_jax.models import LlamaConfig, next_token_loss

from ..chain.programs import lowered_step
from ..ops.test_linear_fp8 import FP8_E4M3, FP8_E5M2, rounded
from .test_recipe_parity import ALIGNED, batch_of, host, scope, start

RECIPE = gtp.FP8(matmuls=True)


@pytest.mark.parametrize(
    "degrees, features, sizes, gradients",
    [
        (dict(gtp=4), 64, (56, 120), "e5m2"),
        (dict(gtp=1), 5, (3, 7), "e4m3"),  # sections of 15 and 35 bytes, with gaps between
    ],
    ids=str,
)
def test_kernels_of_one_weight_share_a_scale_and_are_rounded_once(degrees, features, sizes, gradients):
    recipe = dataclasses.replace(RECIPE, gradient=gradients)
    rng = np.random.default_rng(0)
    kernels = [
        (rng.normal(size=(features, size)) * s).astype(np.float32) for size, s in zip(sizes, (1, 37), strict=True)
    ]
    x = rng.uniform(-1, 1, (8, 4, features)).astype(np.float32)
    cotangents = [rng.uniform(-1, 1, (8, 4, size)).astype(np.float32) for size in sizes]
    # of every rank the same amax, so that all round alike whatever tokens they have
    x[..., 0], cotangents[0][..., 0] = 3, 5

    class Layer(nnx.Module):
        def __init__(self, rngs):
            names = {str(size): size for size in sizes}
            given = dict(zip(sizes, kernels, strict=True))
            self.dense = gtp.Dense(
                features, names, dtype="float32", rngs=rngs,
                kernel_init=lambda _, shape, __: given[shape[1]],
            )  # fmt: skip

        def __call__(self, x):
            return self.dense(x)

    def loss(model, batch):
        found = model(batch["x"])
        return sum((found[str(size)] * c).sum() for size, c in zip(sizes, batch["c"], strict=True)), jnp.float32(1)

    with scope(degrees):
        state = gtp.TrainState.create(gtp.init(Layer, nnx.Rngs(0)), optax.sgd(1.0))
        run = jax.jit(lambda s, b: gtp.train.loss_and_gradients(loss, s, b, recipe=recipe))
        value, gradient = run(state, {"x": x, "c": cotangents})
        gradient = host(gradient)["dense"]["kernel"]
    x8 = rounded(x.reshape(32, -1), FP8_E4M3)
    fused = rounded(np.concatenate(kernels, axis=1), FP8_E4M3)
    c8 = rounded(np.concatenate(cotangents, axis=-1).reshape(32, -1), FP8_E5M2 if gradients == "e5m2" else FP8_E4M3)
    wanted = (x8 @ fused * np.concatenate(cotangents, axis=-1).reshape(32, -1)).sum()
    assert abs(float(value) - wanted) <= 1e-6 * np.abs(x8 @ fused).sum()
    found = np.concatenate([gradient[str(size)] for size in sizes], axis=1)
    assert np.linalg.norm(found - x8.T @ c8) <= 1e-6 * np.linalg.norm(x8.T @ c8)


def test_an_expert_s_kernels_share_a_scale_that_no_other_expert_has():
    ranks, experts, features, outs, groups = 4, 3, 16, {"gate": 8, "up": 24}, [5, 0, 3]
    rng = np.random.default_rng(0)
    size = np.array([1, 1, 300], np.float32)[:, None, None]
    kernels = {n: (rng.normal(size=(experts, n, features)) * size * n).astype(np.float32) for n in outs.values()}
    x, c = (rng.uniform(-1, 1, (ranks, sum(groups), n)).astype(np.float32) for n in (features, sum(outs.values())))
    x[..., 0], c[..., 0] = 3, 5  # of every rank the same amax

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.experts = gtp.nn.GroupedDense(
                experts, features, outs, dtype="float32", rngs=rngs,
                kernel_init=lambda _, shape, __: kernels[shape[1]],
            )  # fmt: skip

        def __call__(self, x):
            return self.experts(x[0], jnp.array(groups))

    def loss(model, batch):
        found = model(batch["x"])
        return (jnp.concatenate([found["gate"], found["up"]], axis=1) * batch["c"][0]).sum(), jnp.float32(1 / ranks)

    with scope(dict(gtp=ranks)):
        state = gtp.TrainState.create(gtp.init(Layer, nnx.Rngs(0)), optax.sgd(1.0))
        run = jax.jit(lambda s, b: gtp.train.loss_and_gradients(loss, s, b, recipe=RECIPE, view="local"))
        value, gradient = run(state, {"x": x, "c": c})
        gradient = host(gradient)["experts"]["kernel"]
    x8, c8 = (np.stack([rounded(one, form) for one in a]) for a, form in ((x, FP8_E4M3), (c, FP8_E5M2)))
    wanted, to_kernels, start = 0.0, [], 0
    for expert, count in enumerate(groups):
        mine = slice(start, start := start + count)
        fused = rounded(np.concatenate([kernels[n][expert] for n in outs.values()]), FP8_E4M3).T
        wanted += (x8[:, mine] @ fused * c[:, mine]).sum()
        to_kernels.append(np.einsum("rti,rto->oi", x8[:, mine], c8[:, mine]))
    assert abs(float(value) - wanted) <= 1e-6 * np.abs(x8 @ fused).sum()
    found, to_kernels = np.concatenate([gradient["gate"], gradient["up"]], axis=1), np.stack(to_kernels)
    assert np.linalg.norm(found - to_kernels) <= 1e-6 * np.linalg.norm(to_kernels)


@pytest.mark.full
def test_codes_of_experts_that_tp_divides_unevenly_have_their_own_scales():
    size = np.array([1, 9, 0.1, 4], np.float32)[:, None, None]  # of 3 ranks the last has no expert

    options = dict(num_experts=4, parallel="expert", sequence_parallel=False, dtype="float32")
    scaled = lambda key, shape, dtype: nnx.initializers.lecun_normal()(key, shape, dtype) * size  # noqa: E731
    make = lambda rngs: gtp.nn.MoE(16, 24, **options, kernel_init=scaled, rngs=rngs)  # noqa: E731

    def loss(model, batch):
        return jnp.sum(model(batch) * jnp.cos(batch)), jnp.float32(batch.size)

    def found(tp):
        with scope(dict(gtp=1, tp=tp)):
            state = gtp.TrainState.create(gtp.init(make, nnx.Rngs(0)), optax.sgd(1.0))
            evaluate = gtp.eval_step(loss, recipe=RECIPE, view="local")
            return float(evaluate(state, jax.random.normal(jax.random.key(1), (4, 8, 16)))["loss"])

    assert found(3) == pytest.approx(found(1), rel=1e-5)


def gradients(changes, pregathered_layers=0):
    config = dataclasses.replace(ALIGNED, dtype="float32", num_layers=4, **changes)
    options = dict(microbatches=2, recipe=RECIPE, pregathered_layers=pregathered_layers)
    with scope(dict(gtp=2)):
        run = jax.jit(lambda s, b: gtp.train.loss_and_gradients(next_token_loss, s, b, **options))
        loss, found = run(start(config, optax.sgd(1.0)), batch_of(config))
        return float(loss), host(found)


@pytest.mark.full
def test_schedules_and_pregathered_layers_change_nothing():
    loss, wanted = gradients({})
    for changes, pregathered_layers in (
        (dict(keep_gathered="all"), 2),
        (dict(prefetch=False), 0),
        (dict(unroll=1, keep_gathered=0), 1),
        (dict(unroll=2, remat="everything"), 0),
        (dict(remat="nothing"), "all"),
    ):
        other, found = gradients(changes, pregathered_layers)
        assert abs(other - loss) <= 1e-6 * abs(loss)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(b).max(), err_msg=str(changes))


SMALL = dict(vocab_size=64, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=128)


@pytest.mark.skipif(not native.has("gtp_unpack", "cpu"), reason=native.describe())
@pytest.mark.parametrize(
    "recipe, unpacks", others_full([(RECIPE, False), (gtp.FP8(), True)], [(RECIPE, False)]), ids=str
)
def test_no_weight_is_dequantized_in_a_pass(recipe, unpacks):
    config = LlamaConfig(**SMALL, num_layers=2)
    text = lowered_step(config, gtp.make_mesh(gtp=4, dp=2), batch=8, seq=16, recipe=recipe).as_text()
    assert ("gtp_unpack" in text) == unpacks and "gtp_pack" in text


@pytest.mark.skipif(not native.has("gtp_pack_apart", "cpu"), reason=native.describe())
@pytest.mark.parametrize("unroll", others_full(["full", 1], ["full"]))
def test_no_pass_cuts_a_layer_s_codes_out_of_a_stack_that_is_written_out(unroll):
    """Such a piece would be a copy of every code in each pass."""
    config, mesh = LlamaConfig(**SMALL, num_layers=4, unroll=unroll), gtp.make_mesh(gtp=2, devices=jax.devices()[:2])
    text = lowered_step(config, mesh, batch=8, seq=16, recipe=RECIPE).as_text()
    pieces = [line for line in text.splitlines() if "dynamic_slice" in line and re.search(r"tensor<4x\d+xui8>", line)]
    assert bool(pieces) == (unroll == 1) and ("gtp_pack_apart" in text) == (unroll == "full")
