"""The collectives of a compiled train step: how many, how large, in which dtype. Counted, not estimated."""

from collections import Counter

import jax
import pytest
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import LlamaConfig

from .programs import counted, lowered_step

LAYERS = 3
# every size a multiple of gtp * 16, so nothing is padded; every weight of a shape of its own
SIZES = dict(vocab_size=640, hidden_size=128, num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=64)
SIZES |= dict(intermediate_size=384, grad_reduce="bf16")


def weights(tp: int) -> list[tuple[int, int]]:
    """Whole weights of a block on one tp rank, `(sharded over gtp, other)`: qkv, out, gate and up, down."""
    return [(512 // tp, 128), (128, 256 // tp), (768 // tp, 128), (128, 384 // tp)]


CASES = {
    "gtp 8": (dict(gtp=8), {}, 1),
    "gtp 8, three microbatches": (dict(gtp=8), {}, 3),
    "gtp 8, looped": (dict(gtp=8), dict(unroll=1), 1),
    "gtp 8, waited for": (dict(gtp=8), dict(prefetch=False), 1),
    "gtp 8, all kept": (dict(gtp=8), dict(keep_gathered="all"), 1),
    "gtp 4 x tp 2": (dict(gtp=4, tp=2), {}, 1),
    "dp 2 x gtp 4": (dict(dp=2, gtp=4), {}, 1),
    "dp 2 x gtp 4, replicas": (dict(dp=2, gtp=4), {}, 1),
}


@pytest.mark.parametrize("case", others_full(CASES, ["gtp 4 x tp 2"]))
def test_each_weight_is_gathered_once_a_pass_and_scattered_once(case):
    degrees, fields, parts = CASES[case]
    mesh, tp = gtp.make_mesh(**degrees), degrees.get("tp", 1)
    replicas = "replicas" in case
    with gtp.mesh.use_roles(gtp.mesh.Roles(optimizer=()) if replicas else gtp.mesh.Roles()):
        step = lowered_step(LlamaConfig(**SIZES, **fields), mesh, batch=8 * parts, seq=256, microbatches=parts)
    found = hlo.collectives(step.compile().as_text())
    assert all(c.exact for c in found)
    over_gtp = [c for c in found if c.axes == ("gtp",)]
    gathers = [c for c in over_gtp if c.kind == "all-gather"]
    scatters = [c for c in over_gtp if c.kind == "reduce-scatter"]

    each, table = LAYERS * parts, (640 // tp, 128)
    blocks = dict.fromkeys(weights(tp), each)
    ends = {table: 2 * parts}  # embedding and head
    forward = {("forward", shape): n for shape, n in {**blocks, **ends}.items()}
    # the head, last of the chain, is kept; an embedding's backward wants no table; blocks are gathered again
    again = {} if fields.get("keep_gathered") == "all" else {("backward", shape): n for shape, n in blocks.items()}
    assert counted(gathers) == {**forward, **again}
    assert counted(scatters) == {("backward", shape): n for shape, n in {**blocks, **ends}.items()}

    gtp_degree = degrees["gtp"]
    for c in gathers:
        assert c.dtype == "u16"  # bfloat16's bits
        assert c.result_bytes == 2 * sum(whole.elements for whole in c.results) == gtp_degree * c.operand_bytes
    for c in scatters:
        assert c.operand_bytes == gtp_degree * c.result_bytes

    over_dp = [c for c in found if c.axes == ("dp",)]
    elements = (LAYERS * sum(a * b for a, b in weights(tp)) + 2 * 640 * 128) // gtp_degree
    if degrees.get("dp", 1) == 1:
        assert not over_dp
    elif replicas:  # shards only, all in one, after the last microbatch
        (total,) = over_dp
        assert (total.kind, total.times, len(total.operands)) == ("all-reduce", 1, 9)
        assert sum(s.elements for s in total.operands) == elements
    else:  # shards are joined once, and their gradients divided again
        joined = [(c.times, c.dtype, c.result_bytes) for c in over_dp if c.kind == "all-gather"]
        assert {(times, dtype) for times, dtype, _ in joined} == {(1, "u16")}
        assert sum(size for _, _, size in joined) == 2 * elements
        divided = [(c.times, c.operand_bytes) for c in over_dp if c.kind == "reduce-scatter"]
        assert len(joined) + len(divided) == len(over_dp)
        assert sum(times * size for times, size in divided) == 4 * elements
    # activations: sequence gathered ahead of qkv, up and head, summed and sharded behind out and down, a hop for every
    # further rank each; at once only behind the embedding
    moved = Counter()
    for c in found:
        if c.axes == ("tp",):
            moved[c.kind, c.direction] += c.times
    ahead, behind = (2 * LAYERS + 1) * parts, 2 * LAYERS * parts
    if tp > 1:
        assert moved.pop(("reduce-scatter", "forward")) == moved.pop(("all-gather", "backward")) == parts
        assert moved.pop(("collective-permute", "forward")) == (tp - 1) * (ahead + behind)
        # the gradients' movements, and the sequence gathered again for the weights' gradients
        assert moved.pop(("collective-permute", "backward")) == (tp - 1) * (ahead + behind + ahead)
    assert {kind for kind, _ in moved} <= {"all-reduce"}


@pytest.mark.full
@pytest.mark.parametrize("remat, unroll", pairwise(["nothing", "matmuls", "activations", "everything"], [1, "full"]))
def test_nothing_moves_over_tp_again_but_the_sequence_and_what_was_not_kept(remat, unroll):
    tp, sizes = 4, {**SIZES, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32}
    config = LlamaConfig(**sizes, remat=remat, unroll=unroll)
    step = lowered_step(config, gtp.make_mesh(gtp=2, tp=tp), batch=2, seq=16, gradients=True)
    moved = Counter()
    for c in hlo.collectives(step.compile().as_text()):
        if c.axes == ("tp",) and c.direction == "backward":
            moved[c.kind] += c.times
    ahead, behind = 2 * LAYERS + 1, 2 * LAYERS
    # gradients, and the sequence for the weights' gradients
    once = (tp - 1) * (ahead + behind + ahead)
    # attention's sum, which the feed-forward half reads; gathers for products made again, whose first hop is shared
    again = (tp - 1) * LAYERS + (tp - 2) * 2 * LAYERS
    assert moved["collective-permute"] == once + (again if remat == "nothing" else 0)
    assert (moved["all-gather"], moved["reduce-scatter"]) == (1, 0)  # of the embedding's gradient, at once


@pytest.mark.slow
def test_matmuls_in_formats_with_blocks_move_the_sequence_at_once():
    """In one layer, whose head multiplies in bfloat16."""
    mesh, recipe = gtp.make_mesh(gtp=2, tp=2, devices=jax.devices()[:4]), gtp.MXFP8(matmuls=True)
    step = lowered_step(LlamaConfig(**{**SIZES, "num_layers": 1}), mesh, batch=2, seq=64, recipe=recipe)
    kinds = Counter(c.kind for c in hlo.collectives(step.compile().as_text()) if c.axes == ("tp",))
    assert kinds["all-gather"] >= 4  # ahead of qkv and up, and behind the gradients of out and down
    assert kinds["collective-permute"] == 3  # of the head
