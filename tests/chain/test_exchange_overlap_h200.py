"""The schedule that XLA makes for H200s of a step whose experts ranks divide. Needs no GPU."""

import itertools

import pytest

import gtp_jax as gtp
from gtp_jax import plan
from gtp_jax.models import LlamaConfig
from gtp_jax.train import compile_options

from ..plan.programs import needs_target
from .programs import lowered_step

LAYERS, WIDTH, SEQ, SEQUENCES, TOP_K = 2, 2048, 4096, 2, 4
TOKENS = SEQ * SEQUENCES
SIZES = dict(
    vocab_size=49152,
    hidden_size=WIDTH,
    num_layers=LAYERS,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=768,
    num_experts=32,
    top_k=TOP_K,
)


def schedule_on(devices: int, chunks: int, degrees, **sizes) -> plan.Schedule:
    mesh = gtp.make_mesh(**degrees, devices=plan.topology_devices(plan.parse_target(f"h200:{devices}")))
    options = {**plan.COMPILE_OPTIONS, **compile_options("gpu", tp=1)}
    config = LlamaConfig(**SIZES, exchange_chunks=chunks, **sizes)
    step = lowered_step(config, mesh, batch=SEQUENCES * devices, seq=SEQ, compiler_options=options)
    return plan.schedule(step.compile().as_text())


def sorted_events(found: plan.Schedule, chunks: int):
    """Exchanges of tokens, and gathers and reductions of weights; a launch is never both."""
    exchanges, weights = [], []
    for event in found.collectives("all-gather", "all-to-all", "ragged-all-to-all", "reduce-scatter"):
        tokens = {
            shape.dims[-2:] == (TOKENS // chunks, WIDTH) for shape in event.collective.operands if shape.bytes > 8e6
        }
        if event.kind == "ragged-all-to-all":
            tokens = {True}
        assert len(tokens) <= 1, f"tokens travel together with weights: {event.collective}"
        (exchanges if tokens == {True} else weights if tokens else []).append(event)
    return exchanges, weights


def of_experts(event: plan.Event) -> bool:
    """Says whether a matmul is a grouped one: a call of a CUDA kernel, or of Pallas's, whose operations are unknown."""
    return event.name.startswith("ffi_call") or event.flops == 0


@pytest.mark.slow
@needs_target
@pytest.mark.parametrize(
    ("degrees", "chunks", "shared"),
    [(dict(gtp=1, ep=8), 1, 0), (dict(gtp=2, ep=4), 2, 768)],
    ids=["ep 8", "gtp 2 x ep 4"],
)
def test_weights_travel_under_attention_and_tokens_under_experts(degrees, chunks, shared):
    found = schedule_on(8, chunks, degrees, shared_hidden=shared)
    exchanges, weights = sorted_events(found, chunks)
    # forward: dispatches and combines of each chunk; backward: tokens again with gradients of sums; those of tokens
    layers = list(itertools.batched(exchanges, 2 * chunks))
    assert len(exchanges) == 2 * LAYERS * 2 * chunks
    for layer in layers:
        first, last = layer[0].start, layer[-1].end
        assert not [w for w in weights if first < w.end and w.start < last], "an exchange waits for weights"
        for event in layer[1:-1]:  # none of one chunk
            assert any(map(of_experts, found.under(event))), f"no experts compute while {event.name} is in flight"
    # ahead of the first attention and behind the last exchange there is nothing that weights could travel under
    began = next(e.start for e in found.events if e.kind == "attention")
    exposed = {e.name for e in found.exposed()}
    assert not [w for w in weights if began < w.end < exchanges[-1].end and w.name in exposed]
    if shared:
        # of the shared expert at least one of two products forward
        combines = [layer[-1] for layer in layers[:LAYERS]]
        assert all(any(not of_experts(e) for e in found.under(combine)) for combine in combines)


DESIGNED = {
    "gather": (dict(gtp=8, ep=8), ["all-gather", "all-to-all"], ["all-gather", "all-gather", "all-to-all"]),
    "ragged": (dict(gtp=4, ep=16), ["ragged-all-to-all"] * 2, ["ragged-all-to-all"] * 3),
}


@pytest.mark.slow
@needs_target
@pytest.mark.parametrize("transport", DESIGNED)
def test_exchanges_on_64_gpus_are_as_designed(transport):
    """Within hosts tokens are gathered, beyond them sent to whom they go: the rule's choice."""
    chunks = 2
    degrees, forward, backward = DESIGNED[transport]
    found, ranks = schedule_on(64, chunks, degrees), degrees["ep"]
    exchanges, _ = sorted_events(found, chunks)
    kinds = []
    for event in exchanges:
        one = event.collective
        assert one.axes in ((), ("ep",)) and one.group == ranks
        assert one.dtype in ("u16", "f32+u16") or transport == "ragged"
        big = [shape for shape in one.operands if shape.bytes > 8e6]
        count = len(big) if one.kind == "all-gather" else 1
        kinds += [one.kind] * count
        if transport == "gather":
            rows = ranks * TOKENS // chunks
            whole = one.results if one.kind == "all-gather" else one.operands
            assert [shape.bytes for shape in whole if shape.dtype == "u16"] == [rows * WIDTH * 2] * count
    assert sorted(kinds) == sorted((forward + backward) * chunks * LAYERS)
    numbers = [c.collective for c in found.collectives() if "s32" in c.collective.dtype]
    assert len(numbers) == LAYERS  # choices, in forward alone
