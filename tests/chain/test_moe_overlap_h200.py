"""The schedule that XLA makes for eight H200s of a step with experts. Needs no GPU."""

import pytest

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import LlamaConfig
from gtp_jax.train import compile_options

from ..hlo.programs import grouped_kernels, needs_target
from .programs import lowered_step

LAYERS = 3
SIZES = dict(
    vocab_size=32768,
    hidden_size=2048,
    num_layers=LAYERS,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=4096,
    num_experts=8,
)


@pytest.mark.slow
@needs_target
def test_experts_are_gathered_and_scattered_under_compute_and_multiplied_by_kernels():
    mesh = gtp.make_mesh(gtp=8, devices=hlo.topology_devices(hlo.parse_target("h200:8")))
    options = {**hlo.COMPILE_OPTIONS, **compile_options("gpu", tp=1)}
    step = lowered_step(LlamaConfig(**SIZES), mesh, batch=8, seq=4096, compiler_options=options)
    text = step.compile().as_text()
    found = hlo.launch_order(text)
    gathers = [e for e in found.collectives("all-gather") if e.collective.axes == ("gtp",)]
    scatters = [e for e in found.collectives("reduce-scatter") if e.collective.axes == ("gtp",)]
    exposed = {e.name for e in found.exposed("all-gather", "reduce-scatter")}
    # the first gather has nothing ahead of it, the last scatters nothing behind
    assert not exposed & {e.name for e in (*gathers[1:], *scatters[:-2])}
    # forward: up and down; backward: two each for the gradients of rows and of kernels
    assert grouped_kernels(text) == 6 * LAYERS
