"""What moves in a step with a recipe: bytes, dtypes and counts from the compiled program."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.formats import codes_shape, scales_shape
from gtp_jax.models import LlamaConfig
from gtp_jax.nn import abstract_model

from ..chain.programs import lowered_step

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


@pytest.mark.parametrize(
    "recipe, numerator, denominator",
    others_full(
        [(gtp.MXFP8(), 33, 32), (gtp.NVFP4(), 129, 256), (gtp.NVFP4(block=(1, 16)), 9, 16)], [(gtp.MXFP8(), 33, 32)]
    ),
)
def test_bytes_an_element_are_those_of_the_formats(recipe, numerator, denominator):
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        make = lambda rngs: gtp.Stack(lambda rngs: gtp.MLP(512, 1024, rngs=rngs), 2, rngs=rngs)  # noqa: E731
        state = gtp.TrainState.create(abstract_model(make), optax.sgd(1.0))
        x = jax.ShapeDtypeStruct((8, 2, 512), jnp.bfloat16, sharding=NamedSharding(jax.sharding.get_mesh(), P("gtp")))

        def loss(model, batch):
            return (model(batch["x"]).astype(jnp.float32) ** 2).sum(), jnp.float32(1)

        lowered = gtp.train_step(loss, optax.sgd(1.0), recipe=recipe).lower(state, {"x": x})
    gathers = [c for c in hlo.collectives(lowered.compile().as_text()) if c.kind == "all-gather"]
    assert {c.dtype for c in gathers} == {"u8"}
    # two layers, forward and backward, of which the last keeps its weights
    elements = 3 * 3 * 512 * 1024
    assert sum(c.result_bytes * c.times for c in gathers) == elements * numerator // denominator


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
