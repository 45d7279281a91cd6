"""The schedule that XLA makes for eight H200s: what runs under what. Needs no GPU."""

import functools

import pytest

import gtp_jax as gtp
from gtp_jax import plan
from gtp_jax.models import LlamaConfig
from gtp_jax.train import compile_options

from .programs import lowered_step

LAYERS = 3
SIZES = dict(vocab=32768, dim=4096, layers=LAYERS, heads=32, kv_heads=8, head_dim=128, ffn=14336)

missing = plan.missing_packages()
pytestmark = pytest.mark.skipif(bool(missing), reason=f"compiling for H200 needs {', '.join(missing)}")


@functools.cache
def exposed(tp: int, prefetch: bool) -> tuple[tuple[plan.Event, ...], tuple[plan.Event, ...]]:
    """Gathers and scatters of weights with neither matmul nor attention between start and end; and all of them."""
    mesh = gtp.make_mesh(gtp=8 // tp, tp=tp, devices=plan.topology_devices(plan.parse_target("h200:8")))
    options = {**plan.COMPILE_OPTIONS, **compile_options("gpu", tp=tp)}
    config = LlamaConfig(**SIZES, prefetch=prefetch)
    step = lowered_step(config, mesh, batch=8 // tp, seq=8192, compiler_options=options)
    found = plan.schedule(step.compile().as_text())
    kinds = ("all-gather", "reduce-scatter")

    def over_gtp(events: tuple[plan.Event, ...]) -> tuple[plan.Event, ...]:
        return tuple(e for e in events if e.collective.axes == ("gtp",))

    return over_gtp(found.exposed(*kinds)), over_gtp(found.collectives(*kinds))


def test_weights_are_gathered_and_their_gradients_scattered_in_bfloat16():
    _, every = exposed(1, prefetch=True)
    assert {e.collective.dtype for e in every if e.kind == "all-gather"} == {"u16"}  # its bits
    assert {e.collective.dtype for e in every if e.kind == "reduce-scatter"} == {"bf16"}


@pytest.mark.parametrize("tp", [1, 2])
def test_every_gather_and_scatter_but_the_outermost_runs_under_compute(tp):
    bare, every = exposed(tp, prefetch=True)
    gathers = [e for e in every if e.kind == "all-gather"]
    scatters = [e for e in every if e.kind == "reduce-scatter"]
    assert {e.direction for e in gathers} == {"forward", "backward"}
    # the first gather has nothing ahead of it, the last scatters, of the first layer and the embedding, nothing behind
    hidden_gathers, hidden_scatters = gathers[1:], scatters[:-2]
    # forward: each layer and the head, the first layer perhaps with the embedding; backward: each layer
    assert len(hidden_gathers) >= 2 * LAYERS and len(hidden_scatters) >= LAYERS
    assert not {e.name for e in bare} & {e.name for e in (*hidden_gathers, *hidden_scatters)}
    assert all(e.collective.asynchronous for e in (*hidden_gathers, *hidden_scatters))


def test_without_prefetch_gathers_are_exposed():
    bare, _ = exposed(1, prefetch=False)
    assert len([e for e in bare if e.kind == "all-gather"]) >= LAYERS
