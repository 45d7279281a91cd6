"""What runs under what, compiled for 8 x H200 on a machine that has none."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from messages import naming

from gtp_jax import hlo

from .programs import array, compiled_text, cpu_mesh, h200_mesh, needs_target, stack

LAYERS, SIZE, ROWS = 4, 4096, 8192
LARGE: dict[str, Any] = dict(layers=LAYERS, size=SIZE, rows=ROWS)


@needs_target
def test_unrolled_gathers_run_under_matmuls_all_but_the_first():
    found = hlo.launch_order(compiled_text(stack(h200_mesh(), how="unrolled", **LARGE)))
    gathers = found.collectives("all-gather")
    assert len(gathers) == LAYERS
    assert found.exposed() == gathers[:1]
    assert [len(found.under(g)) for g in gathers] == [0, 1, 1, 1]


@pytest.mark.full
@needs_target
def test_attention_operations_count_the_causal_half():
    mesh, batch, seq, heads, dim = h200_mesh(), 2, 1024, 8, 64

    def loss(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn").astype(jnp.float32).sum()

    local = partial(jax.shard_map, mesh=mesh, in_specs=(P("gtp"),) * 3, out_specs=(P("gtp"),) * 3, check_vma=False)
    run = jax.jit(local(jax.grad(loss, argnums=(0, 1, 2))))
    q, k = (array(mesh, (8 * batch, seq, n, dim), P("gtp")) for n in (heads, heads // 2))
    forward, backward = hlo.launch_order(compiled_text(run.lower(q, k, k))).events
    scores = batch * heads * seq * seq
    assert (forward.kind, forward.flops) == ("attention", 2 * 2 * scores * dim // 2)
    assert (backward.kind, backward.flops) == ("attention", 5 * 2 * scores * dim // 2)
    assert (forward.direction, backward.direction) == ("forward", "backward")


def test_synchronous_collectives_are_rendered_with_their_loop_and_a_program_without_a_schedule_is_refused():
    text = stack(cpu_mesh(gtp=8), layers=3, size=64, rows=8, how="scan").compile().as_text()
    (gather,) = [line for line in hlo.render(hlo.launch_order(text)).splitlines() if "■" in line]
    assert gather.split()[1:5] == ["■", "all-gather", "x3", "forward"] and gather.endswith("EXPOSED, sync")
    with pytest.raises(ValueError, match=naming("scheduled compiled")):
        hlo.launch_order(text.replace(", is_scheduled=true", ""))
