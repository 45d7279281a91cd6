"""A trace of one step: which kernel is what, what is exposed, and the pictures of it."""

import json
import random
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from messages import naming

from gtp_jax import inspect
from gtp_jax.inspect._breakdown import EXPOSED, IDLE
from gtp_jax.inspect._trace import KINDS, Op, kind_of, parse_trace
from gtp_jax.runner.cli import main

KERNELS = {
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT": "matmul",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": "matmul",
    "gemm_fusion_dot_12": "matmul",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_128x128x128_kernel0_0": "attention",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all-gather",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce-scatter",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "other collective",
    "loop_convert_fusion_3": "elementwise",
    "input_reduce_fusion_2": "elementwise",
    "loop_dynamic_update_slice_fusion_7": "copies",
    "wrapped_transpose": "copies",
    "MemcpyD2D": "copies",
    "void gtp::(anonymous namespace)::dequantize_kernel<gtp::NVFP4, __nv_bfloat16>(gtp::Table)": "quantization",
    "void gtp::(anonymous namespace)::multi_amax_kernel<float>(gtp::AmaxTable<31>, unsigned int*)": "quantization",
}


def gpu_trace(streams: dict[str, list[tuple[str, float, float]]]):
    """A profile of the form that a GPU's has: a plane a device, a line a stream, and lines that sum them up."""
    names = sorted({name for events in streams.values() for name, *_ in events})
    lines = []
    for number, (stream, events) in enumerate({**streams, "XLA Ops": [(names[0], 0, 1e6)]}.items()):
        written = "".join(
            f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {round(start * 1e6)} "
            f"duration_ps: {round((end - start) * 1e6)} }}\n"
            for name, start, end in events
        )
        lines.append(f'lines {{ id: {number} name: "{stream}" timestamp_ns: 1000\n{written} }}')
    metadata = "".join(
        f'event_metadata {{ key: {i + 1} value {{ id: {i + 1} name: "{name}" }} }}\n' for i, name in enumerate(names)
    )
    other = 'planes { name: "/device:GPU:1" } planes { name: "/host:CPU" }'
    plane = f'planes {{ name: "/device:GPU:0"\n{metadata}{" ".join(lines)} }}'
    return jax.profiler.ProfileData.from_text_proto(f"{plane} {other}")


def test_kernels_are_known_by_their_names():
    assert {name: kind_of(name) for name in KERNELS} == KERNELS
    assert kind_of("kernel", "all-gather-start.2") == "all-gather"
    # a call of this library's is one of quantization unless its kernel says otherwise
    of_experts = {"grouped_matmul_kernel<gtp::Factor>": "matmul", "take_kernel": "copies", "transpose_kernel": "copies"}
    found = {name: kind_of(f"void gtp::cuda::{name}(Job)", "ffi_call.3") for name in of_experts}
    assert found == of_experts and kind_of("void gtp::cuda::kernel(Job)", "ffi_call.3") == "quantization"
    assert kind_of("copy_bitcast_fusion.3") == "copies" and kind_of("copy_add_fusion.3") == "elementwise"
    assert set(KERNELS.values()) == set(KINDS)


def test_communication_without_compute_is_exposed():
    some = {kind: name for name, kind in KERNELS.items()}
    matmul, attention, gather, scatter = (some[k] for k in ("matmul", "attention", "all-gather", "reduce-scatter"))
    profile = gpu_trace(
        {
            "Stream #20(Compute)": [(matmul, 10, 40), (attention, 45, 60), (matmul, 90, 100)],
            "Stream #21(MemcpyD2D)": [("MemcpyD2D", 30, 42)],  # 30 to 40 beside a matmul that began first
            "Stream #31(Collective)": [(gather, 0, 30), (scatter, 50, 80)],
        }
    )
    found = inspect.breakdown(parse_trace(profile))
    assert found.total_us == pytest.approx(100)
    assert found.by_kind["copies"] == pytest.approx(2)
    assert (found.by_kind["matmul"], found.by_kind["attention"]) == pytest.approx((40, 15))
    assert found.by_kind[EXPOSED] == found.exposed_us == pytest.approx(10 + 20)
    assert found.by_kind[IDLE] == pytest.approx(3 + 10)
    assert found.communication_us == pytest.approx(60)
    assert found.exposed == (pytest.approx((0, 10)), pytest.approx((60, 80)))
    with pytest.raises(ValueError, match=naming("kernel device 0")):
        parse_trace(jax.profiler.ProfileData.from_text_proto('planes { name: "/host:CPU" }'))


def test_every_moment_is_counted_once():
    for seed in range(20):
        draw = random.Random(seed)
        ops = []
        for i in range(draw.randrange(1, 60)):
            start = draw.uniform(0, 100)
            ops.append(Op(f"k{i}", draw.choice(KINDS), "s", start, start + draw.expovariate(0.3)))
        found = inspect.breakdown(ops)
        begin, end = min(op.start_us for op in ops), max(op.end_us for op in ops)
        assert sum(found.by_kind.values()) == pytest.approx(found.total_us) == pytest.approx(end - begin)
        # by sampling moments
        moments = [draw.uniform(begin, end) for _ in range(400)]
        running = [[op for op in ops if op.start_us <= t < op.end_us] for t in moments]
        bare = sum(bool(at) and all(op.is_collective for op in at) for at in running) / len(moments)
        assert abs(bare - found.share(EXPOSED)) < 0.15
        assert sum(b - a for a, b in found.exposed) == pytest.approx(found.exposed_us)


def test_a_trace_of_this_machine_is_read(tmp_path, capsys):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))

    def program(a, b):
        whole = lax.all_gather(a, "x", tiled=True)
        return lax.psum_scatter(whole @ b, "x", tiled=True)

    run = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False))
    operands = jnp.ones((256, 256)), jnp.ones((256, 256))
    jax.block_until_ready(run(*operands))
    with jax.profiler.trace(str(tmp_path / "trace")):
        jax.block_until_ready(run(*operands))
    files = ["--png", str(tmp_path / "p.png"), "--html", str(tmp_path / "p.html"), "--json", str(tmp_path / "p.json")]
    assert main(["profile", "--trace", str(tmp_path / "trace"), *files]) == 0
    assert "longest kernels" in capsys.readouterr().out
    found = json.loads((tmp_path / "p.json").read_text())
    assert sum(found["by_kind"].values()) == pytest.approx(found["total_us"])
    assert {op.kind for op in inspect.read_trace(tmp_path / "trace")} >= {"matmul", "all-gather", "reduce-scatter"}


def test_what_cannot_be_profiled_is_refused(tmp_path, capsys):
    for flags, message in (
        (["--trace", str(tmp_path)], "trace"),
        (["--contender", "fsdp2 bf16 regather"], "gtp_jax bf16 regather"),
        (["--png", str(tmp_path / "no" / "p.png")], "directory create"),
    ):
        assert main(["profile", *flags]) == 2
        assert re.search(naming(message), capsys.readouterr().err)
