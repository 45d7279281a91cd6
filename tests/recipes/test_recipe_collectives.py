"""What moves in a step with a recipe, by the compiled program; layers that are gathered ahead change no bit of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from selection import pairwise

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.formats import codes_shape, scales_shape
from gtp_jax.models import LlamaConfig, next_token_loss
from gtp_jax.nn import abstract_model

from ..chain.programs import lowered_step
from .test_recipe_parity import ALIGNED, UNALIGNED, batch_of, host, scope, start

LAYERS = 3
SIZES = dict(
    vocab_size=640, hidden_size=128, num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=384,
    grad_reduce="bf16",
)  # fmt: skip


def section(*shapes) -> int:
    return sum(-(-a * b // 16) * 16 for a, b in shapes)


def buffer_bytes(form, gtp_degree, kernels) -> int:
    """Of one rank, by the documented layout: codes, then scales, each section rounded up to 16 bytes."""
    matrices = [(rows // gtp_degree, cols) for rows, cols in kernels]
    scales = [scales_shape(form, m, False) for m in matrices]
    return section(*(codes_shape(form, m, False) for m in matrices), *(s for s in scales if s))


@pytest.mark.parametrize(
    "recipe, tp_and_parts",
    pairwise([gtp.NVFP4(), gtp.MXFP8(), gtp.FP8()], [(2, 1), (1, 3)], usual=1),
    ids=lambda value: value if isinstance(value, tuple) else type(value).__name__,
)
def test_each_layer_is_one_gather_of_bytes_a_pass_and_the_model_one_amax_a_step(recipe, tp_and_parts):
    degree, (tp, parts) = 4, tp_and_parts
    config = LlamaConfig(**SIZES)
    mesh = gtp.make_mesh(gtp=degree, tp=tp, dp=2 // tp)
    step = lowered_step(config, mesh, batch=8 * parts, seq=256, microbatches=parts, recipe=recipe)
    found = hlo.collectives(step.compile().as_text())
    over_gtp = [c for c in found if c.axes == ("gtp",)]
    gathers = [c for c in over_gtp if c.kind == "all-gather"]
    # rows and columns on one tp rank: query, key, value, out, gate, up, down
    kernels = [(256, 128), (128, 128), (128, 128), (128, 256), (384, 128), (384, 128), (128, 384)]
    kernels = [(r, c // tp) if c > 128 else (r // tp, c) for r, c in kernels]
    # a pass each: forward and, gathered again, backward
    expected = [buffer_bytes(recipe.wire, degree, kernels)] * (2 * LAYERS * parts)
    quantized = [c for c in gathers if c.dtype == "u8"]
    assert sorted(size for c in quantized for size in [c.operand_bytes] * c.times) == expected
    assert all(c.result_bytes == degree * c.operand_bytes for c in quantized)
    # what stays in high precision: embedding and head, once a microbatch; no master ever travels
    others = [c for c in gathers if c.dtype != "u8"]
    assert {c.dtype for c in others} == {"u16"} and sum(c.times for c in others) == 2 * parts

    maxima = [c for c in found if c.kind == "all-reduce" and "pmax" in c.op_name and "gtp" in c.axes]
    if recipe.wire.has_amax:
        (amax,) = maxima
        divided = {"dp"} if tp == 1 else set()  # a degree of 2; never over replicas
        assert amax.times == 1 and set(amax.axes) == {"gtp", "tp"} | divided
        assert amax.operand_bytes == 4 * LAYERS * 7  # seven kernels a layer
    else:
        assert not maxima
    scatters = [c for c in over_gtp if c.kind == "reduce-scatter"]
    assert sum(c.times for c in scatters) == (4 * LAYERS + 2) * parts


@pytest.mark.slow
def test_dequantized_weights_are_no_residual():
    sizes = dict(vocab_size=256, hidden_size=512, num_heads=8, num_kv_heads=4, head_dim=64, intermediate_size=1024)
    layer = jnp.dtype(jnp.bfloat16).itemsize * (512 * 1024 + 512 * 512 + 3 * 512 * 1024)

    def temporary(layers):
        step = lowered_step(
            LlamaConfig(**sizes, num_layers=layers), gtp.make_mesh(gtp=8), batch=8, seq=8, recipe=gtp.NVFP4()
        )
        return step.compile().memory_analysis().temp_size_in_bytes

    # a shard's codes and its gradient a layer, never a gathered weight
    assert (temporary(5) - temporary(3)) / 2 / layer < 0.5


ENDS = gtp.NVFP4(
    high_precision_first=1,
    high_precision_last=1,
    matmuls=True,
    override={"mlp.down": gtp.MXFP8(), "attention.out": gtp.recipes.BF16()},
)


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.stack = gtp.Stack(lambda rngs: gtp.Dense(64, 64, dtype="float32", rngs=rngs), length=4, rngs=rngs)

    def __call__(self, x):
        return self.stack(x)


def cubes(model, batch):
    return (model(batch["x"]) ** 3).sum(), np.float32(batch["x"].shape[0])


def test_pregathered_layers_are_counted_from_the_first_that_travels_as_codes():
    recipe = gtp.NVFP4(high_precision_first=1, high_precision_last=1)
    parts, found, gathers = 2, [], []
    x = np.random.default_rng(0).normal(size=(16, 4, 64)).astype(np.float32)
    with scope(dict(gtp=4)):
        state = gtp.TrainState.create(gtp.init(Layers, nnx.Rngs(0)), optax.sgd(1.0))
        for pregathered_layers in (0, 1):
            options = dict(microbatches=parts, recipe=recipe, pregathered_layers=pregathered_layers)
            run = jax.jit(lambda s, b, options=options: gtp.train.loss_and_gradients(cubes, s, b, **options))
            program = run.lower(state, {"x": x}).compile()
            found.append(host(program(state, {"x": x})))
            every = [c for c in hlo.collectives(program.as_text()) if c.kind == "all-gather"]
            gathers.append({kind: sum(c.times for c in every if c.dtype == kind) for kind in ("u8", "f32")})
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)
    # two layers of codes, forward and backward; then one of them once, and the other as before
    assert [each["u8"] for each in gathers] == [2 * 2 * parts, 1 + 2 * parts]
    assert gathers[0]["f32"] == gathers[1]["f32"]


CASES = {
    "gtp 4, three microbatches": (ALIGNED, dict(gtp=4), 3, gtp.NVFP4()),
    "gtp 2 x tp 2, experts": (dataclasses.replace(ALIGNED, num_experts=4), dict(gtp=2, tp=2), 2, gtp.FP8()),
    "gtp 8, unaligned, looped": (dataclasses.replace(UNALIGNED, unroll=1, num_layers=4), dict(gtp=8), 2, gtp.MXFP8()),
    "gtp 2 x tp 2, ends in high precision": (dataclasses.replace(ALIGNED, num_layers=4), dict(gtp=2, tp=2), 2, ENDS),
}


@pytest.mark.full
@pytest.mark.parametrize("name, pregathered_layers", list(zip(CASES, ["all", 1, "all", 1], strict=True)))
def test_not_a_bit_of_loss_and_gradients_changes(name, pregathered_layers):
    config, degrees, parts, recipe = CASES[name]
    config, found = dataclasses.replace(config, dtype="float32"), []
    with scope(degrees):
        state, batch = start(config, optax.sgd(1.0)), batch_of(config, size=16 * parts)
        for count in (0, pregathered_layers):
            options = dict(microbatches=parts, recipe=recipe, pregathered_layers=count)
            run = jax.jit(lambda s, b, options=options: gtp.train.loss_and_gradients(next_token_loss, s, b, **options))
            found.append(host(run(state, batch)))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_cannot_be_pregathered_is_refused():
    ends = gtp.NVFP4(high_precision_first=1, high_precision_last=LAYERS - 1)
    for recipe, count, message in (
        (gtp.NVFP4(), -1, "`pregathered_layers` -1 'all'"),
        (None, "all", "`pregathered_layers` 'all' recipe"),
        (ends, 1, "`pregathered_layers` 1 `Stack`"),
        (gtp.NVFP4(high_precision_last=1), LAYERS, f"`pregathered_layers` {LAYERS} `Stack` {LAYERS - 1}"),
    ):
        with pytest.raises(ValueError, match=naming(message)):
            options = dict(recipe=recipe, pregathered_layers=count)
            lowered_step(LlamaConfig(**SIZES), gtp.make_mesh(gtp=4, dp=2), batch=8, seq=16, **options)
    loss = lambda model, x: jnp.mean(model(x))  # noqa: E731
    with scope(dict(gtp=2)), pytest.raises(ValueError, match=naming("`pregathered_layers` 1 `Stack`")):
        state = gtp.TrainState.create(abstract_model(lambda rngs: gtp.Dense(64, 64, rngs=rngs)), optax.sgd(1.0))
        gtp.train_step(loss, optax.sgd(1.0), recipe=gtp.NVFP4(), pregathered_layers=1).lower(state, jnp.ones((2, 64)))
