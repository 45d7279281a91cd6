"""Operations of attention and bytes of elementwise kernels, in the text of modules, against sums by hand."""

from __future__ import annotations

import pytest

from gtp_jax import hlo

HEADER = "HloModule m, is_scheduled=true, num_partitions=1\n\n"

# A fusion that adds a slice of a stack to a row in float32, writes the sum, and updates a part of a buffer in place.
FUSED = """%fused (a: f32[64,256], b: bf16[256], c: f32[64,256], i: s32[]) -> (bf16[256], f32[64,256]) {
  %a = f32[64,256]{1,0} parameter(0)
  %b = bf16[256]{0} parameter(1)
  %c = f32[64,256]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %half = bf16[64,256]{1,0} convert(%a)
  %zero = s32[] constant(0)
  %row = bf16[1,256]{1,0} dynamic-slice(%half, %i, %zero), dynamic_slice_sizes={1,256}
  %flat = bf16[256]{0} bitcast(%row)
  %sum = bf16[256]{0} add(%flat, %b)
  %wide = f32[256]{0} convert(%sum)
  %part = f32[1,256]{1,0} bitcast(%wide)
  %new = f32[64,256]{1,0} dynamic-update-slice(%c, %part, %i, %zero)
  ROOT %t = (bf16[256]{0}, f32[64,256]{1,0}) tuple(%sum, %new)
}

ENTRY %main (x: f32[64,256], y: bf16[256], z: f32[64,256], j: s32[]) -> (bf16[256], f32[64,256]) {
  %x = f32[64,256]{1,0} parameter(0)
  %y = bf16[256]{0} parameter(1)
  %z = f32[64,256]{1,0} parameter(2)
  %j = s32[] parameter(3)
  %k = bf16[256]{0} copy(%y)
  %q = (u8[256]{0}, f32[1]{0}) custom-call(%k), custom_call_target="gtp_quantize"
  ROOT %f = (bf16[256]{0}, f32[64,256]{1,0}) fusion(%x, %k, %z, %j), kind=kLoop, calls=%fused
}
"""


def test_elementwise_kernels_move_what_reaches_their_results():
    found = hlo.launch_order(HEADER + FUSED)
    assert found.events == ()
    of_fusion = 4 * 256 + 2 * 256 + 4 + 2 * 256 + 4 * 256  # reads a row of a, b and i; writes sum and a row of c
    assert [(e.name, e.moved) for e in found.elementwise] == [("k", 1024), ("q", 512 + 256 + 4), ("f", of_fusion)]


def attention(target: str, dtype: str, queries: int, keys: int, mask: str, window: int = 0) -> hlo.Event:
    """Attention of 2 examples and 4 heads of 8, in a program of its own."""
    config = (
        f'{{"cudnn_fmha_backend_config": {{"intermediate_tensor_shape": {{"element_type": "BF16", "dimensions": '
        f'["2", "4", "{queries}", "{keys}"]}}, "mask_type": "{mask}", "sliding_window_length": {window}}}}}'
    )
    kind = f"{dtype}[2,{queries},4,8]"
    (event,) = hlo.launch_order(
        f"{HEADER}ENTRY %main (q: {kind}) -> {kind} {{\n  %q = {kind} parameter(0)\n  ROOT %y = {kind} "
        f'custom-call(%q), custom_call_target="__cudnn$fmha{target}", metadata={{op_name="transpose(jvp())/remat"}}, '
        f"backend_config={config}\n}}\n"
    ).events
    return event


@pytest.mark.parametrize(
    ("queries", "keys", "mask", "window", "seen"),
    [
        (64, 64, "NO_MASK", 0, 64 * 64),
        (64, 64, "CAUSAL", 0, 64 * 64 // 2),
        (64, 64, "PADDING_CAUSAL", 0, 64 * 64 // 2),  # packed rows count whole
        (64, 32, "CAUSAL", 0, 32 * 32 // 2 + 32 * 32),
        (32, 64, "CAUSAL", 0, 32 * 32 // 2),
        (64, 64, "CAUSAL", 16, 16 * 16 // 2 + 48 * 16),
        (64, 64, "CAUSAL", 64, 64 * 64 // 2),
    ],
)
def test_attention_counts_the_scores_that_are_not_masked(queries, keys, mask, window, seen):
    forward = attention("Softmax", "bf16", queries, keys, mask, window)
    backward = attention("SoftmaxBackward", "bf16", queries, keys, mask, window)
    assert (forward.flops, backward.flops) == (2 * 2 * 2 * 4 * seen * 8, 5 * 2 * 2 * 4 * seen * 8)


def test_attention_has_the_rate_of_its_kernel_even_where_backward_recomputes_forward():
    cases = {"Softmax": "bf16", "SoftmaxBackward": "bf16", "SoftmaxF8": "f8e4m3fn"}
    found = [attention(target, dtype, 8, 8, "CAUSAL") for target, dtype in cases.items()]
    assert [e.rate for e in found] == ["attention forward", "attention backward", "FP8 attention forward"]
    assert {e.direction for e in found} == {"backward"}


@pytest.mark.parametrize(
    ("target", "dtype", "rate"),
    [
        ("__cublas$lt$matmul", "bf16", "bf16 matmuls"),
        ("__cublas$lt$matmul$f8", "f8e4m3fn", "FP8 matmuls"),
        ("gtp_grouped_product", "u8", "FP8 matmuls"),
        ("gtp_grouped_product", "bf16", "bf16 matmuls"),
        ("gtp_blocked_product", "u8", "FP8 matmuls"),
    ],
)
def test_matmuls_have_the_rate_of_their_operands(target, dtype, rate):
    (event,) = hlo.launch_order(
        f"{HEADER}ENTRY %main (x: {dtype}[4,8]) -> bf16[4,16] {{\n  %x = {dtype}[4,8] parameter(0)\n"
        f"  %w = {dtype}[16,8] constant(0)\n"
        f'  ROOT %y = bf16[4,16] custom-call(%x, %w), custom_call_target="{target}", '
        'backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}\n}\n'
    ).events
    assert (event.kind, event.rate, event.flops) == ("matmul", rate, 2 * 4 * 8 * 16)
