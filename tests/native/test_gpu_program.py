"""What XLA compiles for a GPU, on a machine without one."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gtp_jax as gtp
from gtp_jax import hlo, native
from gtp_jax.formats import NVFP4, PackPlan, Piece

from ..hlo.programs import h200_mesh, needs_target

pytestmark = pytest.mark.skipif(not native.has("gtp_pack", "CUDA"), reason=native.describe())

PIECE = Piece(rows=256, cols=1024, transposed=True, total_rows=2048, out=0, out_row=0)
PLAN = PackPlan((PIECE,))


@needs_target
def test_a_packed_gather_calls_one_kernel_on_each_side_and_says_how_long_it_takes():
    mesh = h200_mesh()

    def weight(shards, amax):
        buffer = gtp.ops.pack([shards], NVFP4, amax, PLAN)
        gathered = jax.lax.all_gather(buffer, "gtp")
        (whole,) = gtp.ops.unpack(gathered, NVFP4, amax, PLAN)
        return whole

    mapped = jax.shard_map(weight, mesh=mesh, in_specs=(P(None, "gtp"), P()), out_specs=P(), check_vma=False)
    w = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "gtp")))
    amax = jax.ShapeDtypeStruct((1,), jnp.float32, sharding=NamedSharding(mesh, P()))
    text = jax.jit(mapped).lower(w, amax).compile(hlo.COMPILE_OPTIONS).as_text()
    calls = re.findall(r'custom_call_target="(gtp_\w+)".*latency_metadata="(\d+)"', text)
    assert [name for name, _ in calls] == ["gtp_pack", "gtp_unpack"]
    # 256 x 1024 of bfloat16 and 0.504 bytes each; eight times that, at 4000 bytes a nanosecond, and a launch each
    assert [round(int(ns), -1) for _, ns in calls] == [2160, 3310]
    (gather,) = hlo.collectives(text)
    assert gather.kind == "all-gather" and [str(s) for s in gather.results] == [f"u8[8,{PLAN.bytes(NVFP4)}]"]
