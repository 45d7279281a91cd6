"""The schedule that XLA makes for eight H200s of a step with a recipe. Needs no GPU, but the CUDA kernels' names."""

import math
import re
from collections import Counter

import pytest

import gtp_jax as gtp
from gtp_jax import hlo, native
from gtp_jax.models import LlamaConfig
from gtp_jax.train import compile_options

from ..chain.programs import lowered_step
from ..hlo.programs import needs_target

LAYERS = 3
SIZES = dict(
    vocab_size=32768, hidden_size=4096, num_layers=LAYERS, num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=14336,
)  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    needs_target,
    pytest.mark.skipif(not native.has("gtp_quantize", "CUDA"), reason=native.describe()),
]


def compiled(recipe, fp8=False, ranks=8, num_layers=LAYERS, seq=8192, **options_of_model):
    """A step for as many H200s, an example each."""
    mesh = gtp.make_mesh(gtp=ranks, devices=hlo.topology_devices(hlo.parse_target(f"h200:{ranks}")))
    options = {**hlo.COMPILE_OPTIONS, **compile_options("gpu", tp=1, fp8=fp8)}
    config = LlamaConfig(**{**SIZES, "num_layers": num_layers, **options_of_model})
    return lowered_step(config, mesh, batch=ranks, seq=seq, compiler_options=options, recipe=recipe).compile()


def test_a_layer_is_one_gather_of_bytes_under_the_layer_ahead_and_one_kernel():
    text = compiled(gtp.NVFP4()).as_text()
    found = hlo.launch_order(text)
    gathers = [e for e in found.collectives("all-gather") if e.collective.axes == ("gtp",)]
    quantized = [e for e in gathers if "u8" in e.collective.dtype]  # XLA may join one with the head's
    assert [e.direction for e in quantized] == ["forward"] * LAYERS + ["backward"] * LAYERS
    assert len(gathers) <= len(quantized) + 2  # embedding and head
    # the embedding's has nothing ahead of it, and no matmul for the first layer's to hide under
    assert {e.name for e in found.exposed("all-gather")} <= {e.name for e in gathers[:2]}
    assert all(e.collective.asynchronous for e in gathers[2:])
    launches = [text.count(f'custom_call_target="gtp_{name}"') for name in ("multi_amax", "pack_apart", "unpack")]
    assert launches == [1, 1, 2 * LAYERS]


def test_codes_that_fp8_matmuls_take_as_they_are_travel_in_one_launch_a_layer_too():
    text = compiled(gtp.FP8(matmuls=True), fp8=True).as_text()
    gathers = [e for e in hlo.launch_order(text).collectives("all-gather") if "u8" in e.collective.dtype]
    assert [e.direction for e in gathers] == ["forward"] * LAYERS + ["backward"] * LAYERS
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 3 * 4 * LAYERS
    # for every matmul the input and the gradient once, both ways, except those that SwiGLU's kernels make; of weights,
    # only the codes, once per step
    names = ("quantize", "swiglu_amax", "swiglu_quantize", "swiglu_quantize_gradient", "unpack", "pack_apart")
    launches = [text.count(f'custom_call_target="gtp_{name}"') for name in names]
    assert launches == [(2 * 4 - 2) * LAYERS, 2 * LAYERS, LAYERS, LAYERS, 0, 4]
    # neither hidden nor the gradient of gate and up is computed or stored
    assert not re.findall(r"= bf16\[(?:1,)?8192,(?:28672|14336)\]\S* (?:multiply|concatenate|fusion)\(", text)


def test_gathers_of_codes_start_two_matmuls_before_they_are_needed():
    """By XLA's own rates they start later: some just before a matmul, which takes all multiprocessors before them."""
    found = hlo.launch_order(compiled(gtp.FP8(matmuls=True), fp8=True, ranks=2, keep_gathered="auto").as_text())
    gathers = [e for e in found.collectives("all-gather") if "u8" in e.collective.dtype]
    # no layer runs before the first, and only the head's matmuls before the first of backward, which are not in FP8
    assert all(len(found.under(e)) >= 2 for e in (*gathers[1:LAYERS], *gathers[LAYERS + 1 :]))


def test_scaling_by_earlier_steps_takes_no_pass_and_no_memory_that_current_scaling_does_not_take():
    def facts(recipe):  # with an MLP that runs layer by layer under both
        step = compiled(recipe, fp8=True, ranks=2, num_layers=2, seq=2048, activation="gelu_tanh")
        memory, text = step.memory_analysis(), step.as_text()
        kernels = Counter(re.findall(r'custom_call_target="(gtp_quantize|__cublas\$lt\$matmul\$f8)"', text))
        large = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"= f32\[([\d,]+)\]\S* copy\(", text)]
        return kernels, sum(n for n in large if n >= 1 << 20), memory.temp_size_in_bytes

    (kernels, copied, bytes_), (wanted, wanted_copied, wanted_bytes) = map(
        facts, (gtp.recipes.FP8Delayed(), gtp.FP8(matmuls=True, keep_codes=False))
    )
    assert kernels == wanted and copied == wanted_copied == 0  # no master is copied to read its amax
    assert bytes_ <= 1.02 * wanted_bytes


@pytest.mark.parametrize("grad_wire", ["bf16", "mxfp8"])
def test_a_layers_gradient_is_exchanged_under_the_layer_before(grad_wire):
    found = hlo.launch_order(compiled(gtp.NVFP4(grad_wire=grad_wire)).as_text())
    exchanges = found.collectives("all-to-all")
    assert len(exchanges) == LAYERS and all(e.direction == "backward" for e in exchanges)
    # the first layer's has only the embedding's gradient to hide under
    assert {e.name for e in found.exposed("all-to-all")} <= {exchanges[-1].name}
    assert all(e.collective.asynchronous for e in exchanges[:-1])
