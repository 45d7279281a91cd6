"""What XLA makes of activations in the host's memory, for two H200s. Needs no GPU."""

import functools

import pytest

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import LlamaConfig
from gtp_jax.train import compile_options

from ..hlo.programs import needs_target
from .programs import lowered_step

LAYERS, SEQ, HIDDEN = 6, 2048, 512
SIZES = dict(vocab_size=256, hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, head_dim=128, intermediate_size=1024)

pytestmark = [pytest.mark.slow, needs_target]


@functools.cache
def compiled(remat: str, unroll, seq: int = SEQ):
    mesh = gtp.make_mesh(gtp=2, devices=hlo.topology_devices(hlo.parse_target("h200:2")))
    options = {**hlo.COMPILE_OPTIONS, **compile_options("gpu", tp=1)}
    config = LlamaConfig(**SIZES, num_layers=LAYERS, remat=remat, unroll=unroll)
    step = lowered_step(config, mesh, batch=2, seq=seq, compiler_options=options).compile()
    return hlo.parse(step.as_text()), step.memory_analysis()


@pytest.mark.parametrize("unroll", ["full", 1])
def test_the_inputs_of_layers_are_copied_to_the_host_and_back_in_the_background(unroll):
    module, memory = compiled("offload", unroll)
    copies, order = hlo.host_copies(module), hlo.launch_order(module)
    for kind in (hlo.TO_HOST, hlo.FROM_HOST):
        own = [copy for copy in copies if copy.kind == kind]
        assert sum(copy.times for copy in own) == LAYERS
        assert {copy.shapes[0].bytes for copy in own} == {SEQ * HIDDEN * 2}
        assert all(copy.end > copy.start for copy in own)
        hidden = sum(copy.times for copy in own if order.under(copy))
        assert hidden >= LAYERS - 1  # nothing but the head runs above the last layer
    assert memory.host_temp_size_in_bytes == LAYERS * SEQ * HIDDEN * 2


def test_device_memory_shrinks_by_what_is_on_the_host_but_for_the_layers_in_flight():
    module, before = compiled("matmuls", "full", 4 * SEQ)  # long enough that saved activations are the peak
    _, after = compiled("offload-matmuls", "full", 4 * SEQ)
    assert not hlo.host_copies(module) and before.host_temp_size_in_bytes == 0
    layer = after.host_temp_size_in_bytes / LAYERS
    assert before.temp_size_in_bytes - after.temp_size_in_bytes > (LAYERS - 3) * layer
