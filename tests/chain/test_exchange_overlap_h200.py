"""The schedule that XLA makes for H200s of a step whose experts or sequences ranks divide. Needs no GPU."""

import itertools

import pytest

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import LlamaConfig
from gtp_jax.train import compile_options

from ..hlo.programs import grouped_kernels, needs_target
from .programs import lowered_step

LAYERS, WIDTH, SEQ, SEQUENCES, TOP_K = 2, 2048, 4096, 2, 4
TOKENS = SEQ * SEQUENCES
SIZES = dict(vocab_size=49152, hidden_size=WIDTH, num_layers=LAYERS, num_heads=16, num_kv_heads=4, head_dim=128)
SIZES |= dict(intermediate_size=768, num_experts=32, top_k=TOP_K)


def schedule_on(devices: int, chunks: int, degrees, seq=SEQ, recipe=None, **sizes) -> hlo.LaunchOrder:
    mesh = gtp.make_mesh(**degrees, devices=hlo.topology_devices(hlo.parse_target(f"h200:{devices}")))
    options = {**hlo.COMPILE_OPTIONS, **compile_options("gpu", tp=1)}
    config = LlamaConfig(**{**SIZES, **sizes}, exchange_chunks=chunks)
    step = lowered_step(config, mesh, batch=SEQUENCES * devices, seq=seq, compiler_options=options, recipe=recipe)
    return hlo.launch_order(step.compile().as_text())


def sorted_events(found: hlo.LaunchOrder, chunks: int):
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


def of_experts(event: hlo.Event) -> bool:
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
        assert one.axes == ("ep",) and one.group == ranks
        assert one.dtype in ("u16", "f32+u16")
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


SMALL = dict(num_layers=1, vocab_size=1024, hidden_size=512, num_heads=4, intermediate_size=384)


@pytest.mark.slow
@needs_target
@pytest.mark.parametrize(("transport", "chunks"), [("gather", 2), ("ragged", 1)])
def test_of_fp8_experts_codes_are_dispatched_and_sums_and_gradients_have_16_bits(transport, chunks):
    """Of each operand of a rank, the room that it takes: that of a ragged exchange is for all tokens to go to as many
    ranks as they can."""
    ranks, seq = 8, 512
    tokens, width = SEQUENCES * seq, SMALL["hidden_size"]
    recipe = gtp.FP8(matmuls=True, exclude=())
    found = schedule_on(8, chunks, dict(gtp=1, ep=ranks), seq=seq, recipe=recipe, transport=transport, **SMALL)
    launched = [e.collective for e in found.collectives() if e.collective.axes == ("ep",)]
    part = tokens // chunks * width
    choices, shares = (("all-gather", dtype, tokens * TOP_K * 4) for dtype in ("s32", "f32"))
    gradients_of_shares = "all-to-all", "f32", ranks * tokens * TOP_K * 4
    amaxes = [c for c in launched if c.kind == "all-reduce" and "pmax" in c.op_name]
    assert [(c.direction, c.dtype) for c in amaxes] == [("forward", "f32")]  # of all tokens, not reduced again
    sent = {"forward": [], "backward": []}
    for c in launched:
        if c.kind == "ragged-all-to-all":
            assert c.axes == ("ep",)
            sent[c.direction].append((c.kind, c.dtype, c.operand_bytes, c.result_bytes))
            assert [one.dims for one in c.operands[2:]] == [(ranks,)] * 4  # where runs begin, and how long they are
        elif c.kind != "all-reduce":
            sent[c.direction] += [(c.kind, one.dtype, one.bytes) for one in c.operands]  # XLA may join several
    if transport == "gather":
        there, back, room_there, room_back = "all-gather", "all-to-all", (part,), (ranks * part,)
    else:
        there = back = "ragged-all-to-all"
        room_there, room_back = (min(ranks, TOP_K) * part, ranks * part), (ranks * part, min(ranks, TOP_K) * part)
    codes = there, "u8", *room_there
    wide_there = there, "u16", *(2 * size for size in room_there)
    wide_back = back, "u16", *(2 * size for size in room_back)
    wanted = {
        "forward": [choices, shares, *[codes, wide_back] * chunks],
        "backward": [shares, *[codes, wide_there, wide_back] * chunks, gradients_of_shares],
    }
    assert {way: sorted(found) for way, found in sent.items()} == {way: sorted(w) for way, w in wanted.items()}


# experts that every rank has whole
WHOLE = dict(
    vocab_size=32768, num_layers=3, num_kv_heads=8, head_dim=128, intermediate_size=4096, num_experts=8, top_k=2
)


@pytest.mark.slow
@needs_target
def test_experts_are_gathered_and_scattered_under_compute_and_multiplied_by_kernels():
    mesh = gtp.make_mesh(gtp=8, devices=hlo.topology_devices(hlo.parse_target("h200:8")))
    options = {**hlo.COMPILE_OPTIONS, **compile_options("gpu", tp=1)}
    step = lowered_step(LlamaConfig(**{**SIZES, **WHOLE}), mesh, batch=8, seq=4096, compiler_options=options)
    text = step.compile().as_text()
    found = hlo.launch_order(text)
    gathers = [e for e in found.collectives("all-gather") if e.collective.axes == ("gtp",)]
    scatters = [e for e in found.collectives("reduce-scatter") if e.collective.axes == ("gtp",)]
    exposed = {e.name for e in found.exposed("all-gather", "reduce-scatter")}
    # the first gather has nothing ahead of it, the last scatters nothing behind
    assert not exposed & {e.name for e in (*gathers[1:], *scatters[:-2])}
    # forward: up and down; backward: two each for the gradients of rows and of kernels
    assert grouped_kernels(text) == 6 * WHOLE["num_layers"]


@pytest.mark.slow
@needs_target
def test_keys_and_halves_of_queries_travel_at_once_under_attention_to_own_keys():
    """Between two ranks; there and back, in both passes. Weights travel apart from them."""
    found = schedule_on(2, 1, dict(gtp=1, cp=2), num_experts=0, sequence_exchange="keys")
    rows, part, heads, kv_heads, head_dim = 2 * SEQUENCES, SEQ // 2, 16, 4, 128
    half, keys = (rows, part // 2, heads, head_dim), (rows, part, kv_heads, head_dim)
    sent = {
        ("all-gather", "forward"): ([(2, *half), (2, *keys), (2, *keys)], 2 * rows),
        ("all-gather", "backward"): ([(2, 3, *half), (2, rows, heads, part // 2), (2, *keys), (2, *keys)], 2 * rows),
        ("reduce-scatter", "backward"): ([(1, *half), (1, *keys), (1, *keys)], rows),
    }
    for (kind, way), (parts, examples) in sent.items():
        whole = [(e, [s.dims for s in e.collective.results]) for e in found.collectives(kind) if e.direction == way]
        launched = [(e, dims) for e, dims in whole if parts[-1] in dims]
        assert len(launched) == LAYERS
        for event, dims in launched:
            assert not [one for one in parts if dims.count(one) != parts.count(one)]
            (over,) = found.under(event)  # causal attention of the two halves, or that of the second to the first
            assert over.kind == "attention" and (examples, heads, part // 2, head_dim) in {s.dims for s in over.shapes}
    results = [e for e in found.collectives("all-gather") if (2, rows, heads, part // 2) in {s.dims for s in e.shapes}]
    assert len(results) == 2 * LAYERS
    assert not {e.name for e in results} & {e.name for e in found.exposed()}
    between = [e for e in found.collectives("all-gather") if (2, *half) in {s.dims for s in e.shapes}][0]
    assert "u16" not in between.collective.dtype
