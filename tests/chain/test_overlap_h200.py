"""The schedule that XLA makes for eight H200s: what runs under what. Needs no GPU."""

import functools

import pytest

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import LlamaConfig
from gtp_jax.train import compile_options

from ..hlo.programs import needs_target
from .programs import lowered_step

LAYERS = 3
SIZES = dict(vocab_size=32768, hidden_size=4096, num_layers=LAYERS, num_heads=32, num_kv_heads=8, head_dim=128)
SIZES |= dict(intermediate_size=14336)

pytestmark = needs_target


# of a block on one device, tp 1: qkv, out, gate and up, down; as they are gathered
WEIGHTS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
BLOCK = sum(rows * cols for rows, cols in WEIGHTS)
TABLE = 32768 * 4096  # of the embedding, and of the head
TOKENS = 8192  # a device


@functools.cache
def compiled(tp: int, prefetch: bool, keep_gathered=1, grad_reduce="bf16") -> tuple[str, int]:
    """The program for eight H200s, and its temporary bytes on one."""
    mesh = gtp.make_mesh(gtp=8 // tp, tp=tp, devices=hlo.topology_devices(hlo.parse_target("h200:8")))
    options = {**hlo.COMPILE_OPTIONS, **compile_options("gpu", tp=tp)}
    config = LlamaConfig(**SIZES, prefetch=prefetch, keep_gathered=keep_gathered, grad_reduce=grad_reduce)
    step = lowered_step(config, mesh, batch=8 // tp, seq=TOKENS, compiler_options=options).compile()
    return step.as_text(), step.memory_analysis().temp_size_in_bytes


def exposed(tp: int, prefetch: bool) -> tuple[tuple[hlo.Event, ...], tuple[hlo.Event, ...]]:
    """Gathers and scatters of weights with neither matmul nor attention between start and end; and all of them."""
    found = hlo.launch_order(compiled(tp, prefetch)[0])
    kinds = ("all-gather", "reduce-scatter")

    def over_gtp(events: tuple[hlo.Event, ...]) -> tuple[hlo.Event, ...]:
        return tuple(e for e in events if e.collective.axes == ("gtp",))

    return over_gtp(found.exposed(*kinds)), over_gtp(found.collectives(*kinds))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, kind, dtype, size", [("float32", "reduce-scatter", "f32", 4), ("bf16-wire", "all-to-all", "u16", 2)]
)
def test_gradients_that_are_summed_in_float32_move_under_compute_too(name, kind, dtype, size):
    text, temporary = compiled(1, True, grad_reduce=name)
    found = hlo.launch_order(text)
    sums = [e for e in found.collectives("reduce-scatter", "all-to-all") if e.collective.axes == ("gtp",)]
    assert {(e.kind, e.collective.dtype) for e in sums} == {(kind, dtype)}
    assert sum(e.collective.operand_bytes for e in sums) == size * (LAYERS * BLOCK + 2 * TABLE)
    # the last two, of the first layer and the embedding, have nothing to run under
    assert not {e.name for e in found.exposed(kind)} & {e.name for e in sums[:-2]}
    # no slot is an array: one layer's gradients have twice the bytes while they wait, and that is all
    assert temporary <= compiled(1, True)[1] + 2 * BLOCK


@pytest.mark.slow
def test_a_layer_is_one_gather_a_pass_and_one_scatter_and_moves_each_weight_once_in_bfloat16():
    _, every = exposed(1, prefetch=True)
    count = {kind: [e.direction for e in every if e.kind == kind] for kind in ("all-gather", "reduce-scatter")}
    # the embedding travels with the first layer or by itself; so may the head
    assert count["all-gather"].count("backward") == LAYERS
    assert LAYERS + 1 <= count["all-gather"].count("forward") <= LAYERS + 2
    assert LAYERS <= len(count["reduce-scatter"]) <= LAYERS + 2
    dtypes = {(e.kind, e.collective.dtype) for e in every}
    assert dtypes == {("all-gather", "u16"), ("reduce-scatter", "bf16")}  # the bits of bfloat16, and sums in it
    gathered = sum(e.collective.result_bytes for e in every if e.kind == "all-gather")
    scattered = sum(e.collective.operand_bytes for e in every if e.kind == "reduce-scatter")
    assert gathered == 2 * (2 * LAYERS * BLOCK + 2 * TABLE)
    assert scattered == 2 * (LAYERS * BLOCK + 2 * TABLE)


@pytest.mark.full
def test_no_gathered_weight_is_copied():
    text, _ = compiled(1, True)
    # a shard of the embedding has the shape of the attention's output weight
    whole = {dims for weight in WEIGHTS if weight != (4096, 4096) for dims in (weight, weight[::-1])}
    # the embedding's gather, which has nothing to hide under, may be waited for at once
    moved = ("all-gather", "all-gather-start", "all-gather-done", "reduce-scatter-start")
    moved += ("bitcast", "tuple", "get-tuple-element")
    for visit in hlo.parse(text).walk():
        made = visit.instruction
        if made.opcode not in moved and any(shape.dims in whole for shape in made.shapes):
            assert made.opcode == "custom-call" and "cublas" in made.attributes, made  # a weight's gradient


def activations() -> int:
    """Bytes that backward wants of one layer: outputs of its matmuls and of attention, and its input; in bfloat16."""
    return 2 * TOKENS * (sum(rows for rows, _ in WEIGHTS) + 2 * 4096)


@pytest.mark.full
def test_memory_is_activations_logits_and_two_layers_of_weights():
    _, temporary = compiled(1, True)
    assert temporary < LAYERS * activations() + 4 * TOKENS * 32768 + 2 * 2 * BLOCK


@pytest.mark.slow
def test_kept_weights_cost_their_size_and_no_more():
    growth = compiled(1, True, keep_gathered="all")[1] - compiled(1, True)[1]
    assert (LAYERS - 2) * 2 * BLOCK < growth < LAYERS * 2 * BLOCK


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.full), 2])
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


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_activations_move_over_tp_in_parts_under_matmuls(tp):
    found = hlo.launch_order(compiled(tp, True)[0])
    every = [e for e in found.collectives("collective-permute") if e.collective.axes == ("tp",)]
    ahead, behind = 2 * LAYERS + 1, 2 * LAYERS  # qkv, up and head; out and down; a weight's gradient gathers again
    assert [e.direction for e in every].count("forward") == (tp - 1) * (ahead + behind)
    assert [e.direction for e in every].count("backward") == (tp - 1) * (2 * ahead + behind)
    assert {(e.collective.dtype, e.collective.operand_bytes) for e in every} == {("bf16", 2 * TOKENS // tp * 4096)}
    bare = found.exposed("collective-permute")
    assert len(bare) <= (tp > 2) and all(e.collective.asynchronous for e in every if e not in bare)


@pytest.mark.slow
@pytest.mark.parametrize("grad_reduce", ["bf16", "float32"])
def test_in_a_loop_over_dp_each_gather_and_both_sums_of_a_layer_run_under_compute(grad_reduce):
    mesh = gtp.make_mesh(dp=2, gtp=4, devices=hlo.topology_devices(hlo.parse_target("h200:8")))
    options = {**hlo.COMPILE_OPTIONS, **compile_options("gpu", tp=1)}
    config = LlamaConfig(**{**SIZES, "num_layers": 6}, unroll=1, grad_reduce=grad_reduce)
    step = lowered_step(config, mesh, batch=8, seq=TOKENS, compiler_options=options).compile()
    found = hlo.launch_order(step.as_text())
    looped = [e for e in found.collectives("all-gather", "reduce-scatter") if e.collective.times > 1]
    wanted = [("forward", "all-gather", "gtp"), ("backward", "all-gather", "gtp")]
    wanted += [("backward", "reduce-scatter", "gtp"), ("backward", "reduce-scatter", "dp")]
    assert sorted((e.direction, e.kind, *e.collective.axes) for e in looped) == sorted(wanted)
    assert not {e.name for e in found.exposed()} & {e.name for e in looped}


@pytest.mark.slow
def test_without_prefetch_gathers_are_exposed():
    bare, _ = exposed(1, prefetch=False)
    assert len([e for e in bare if e.kind == "all-gather"]) >= LAYERS
