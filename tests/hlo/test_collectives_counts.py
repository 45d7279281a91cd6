"""Collectives of compiled programs: kind, bytes, dtype, group, number of times, direction."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from gtp_jax import hlo

from .programs import array, compiled_text, cpu_mesh, h200_mesh, needs_target, stack


def test_gathers_and_scatters_of_a_scanned_stack_are_counted_with_their_bytes():
    text = stack(cpu_mesh(gtp=8), layers=5, size=128, rows=16, how="scan", grad=True).compile().as_text()
    found = {c.kind: c for c in hlo.collectives(text)}
    assert set(found) == {"all-gather", "reduce-scatter"} and len(hlo.collectives(text)) == 2
    forward, backward = found["all-gather"], found["reduce-scatter"]
    assert (forward.times, forward.exact, forward.direction, forward.dtype) == (5, True, "forward", "u16")
    assert (forward.operand_bytes, forward.result_bytes) == (2 * 128 * 16, 2 * 128 * 128)
    assert forward.wire_bytes == 7 * 2 * 128 * 16
    assert (backward.times, backward.direction) == (5, "backward")
    assert backward.operand_bytes == 8 * backward.result_bytes == 8 * backward.wire_bytes // 7
    assert forward.axes == backward.axes == ("gtp",) and forward.group == backward.group == 8
    assert not forward.asynchronous


def test_every_kind_is_recognised_with_its_axes_and_group():
    mesh = cpu_mesh(dp=2, gtp=4)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P(("dp", "gtp")), out_specs=P(("dp", "gtp")), check_vma=False)
    def run(x):
        x = lax.psum(x, "dp") + lax.psum_scatter(lax.all_gather(x, "gtp", tiled=True), ("gtp", "dp"), tiled=True).sum()
        x = lax.all_to_all(x, "gtp", 0, 0, tiled=True)
        return lax.ppermute(x, "gtp", [(i, (i + 1) % 4) for i in range(4)])

    found = hlo.collectives(run.lower(array(mesh, (256, 8), P(("dp", "gtp")), jnp.float32)).compile().as_text())
    assert {(c.kind, c.group, c.axes) for c in found} == {
        ("all-reduce", 2, ("dp",)),
        ("all-gather", 4, ("gtp",)),
        ("reduce-scatter", 8, ("gtp", "dp")),
        ("all-to-all", 4, ("gtp",)),
        ("collective-permute", 4, ("gtp",)),
    }
    by_kind = {c.kind: c for c in found}
    assert by_kind["all-reduce"].wire_bytes == by_kind["all-reduce"].operand_bytes == 32 * 8 * 4
    assert by_kind["collective-permute"].wire_bytes == 32 * 8 * 4
    assert sum(s.elements for s in by_kind["all-to-all"].operands) == 32 * 8


def collectives_of(*lines, ranks=8):
    """The collectives of a program of these lines."""
    body = "".join(f"  {line}\n" for line in lines)
    main = f"ENTRY %main (x: f32[4]) -> f32[4] {{\n  %x = f32[4]{{0}} parameter(0)\n{body}}}\n"
    return hlo.collectives(f"HloModule m, num_partitions={ranks}\n\n{main}")


def all_reduce(groups, name="ROOT %r", operand="%x"):
    return f"{name} = f32[4]{{0}} all-reduce({operand}), channel_id=1, replica_groups={groups}, to_apply=%add"


def test_groups_are_read_in_every_notation():
    for groups, expected in {
        "mesh['dp'=2,'gtp'=4,'tp'=1] {'dp','gtp'}": (("dp", "gtp"), 8),
        "mesh['dp'=2,'gtp'=4] {'gtp':(2)2}": (("gtp",), 2),
        "[2,4]<=[4,2]T(1,0)": ((), 4),
        "{{0,1},{2,3},{4,5},{6,7}}": ((), 2),
        "{}": ((), 8),
    }.items():
        (found,) = collectives_of(all_reduce(groups))
        assert (found.axes, found.group) == expected, groups


def test_listed_groups_and_permutations_have_the_axes_that_their_ranks_make_up():
    for groups, expected in {
        "{{0,2,4,6},{1,3,5,7}}": (("ep",), 4),
        "{{0,1},{2,3},{4,5},{6,7}}": (("tp",), 2),
        "{{0,1,2,3,4,5,6,7}}": (("ep", "tp"), 8),
        "{{0,3},{1,2},{4,7},{5,6}}": ((), 2),
        "{{0,1},{2,3,4,5,6,7}}": ((), 2),
        "{{0},{1},{2},{3},{4},{5},{6},{7}}": ((), 1),
    }.items():
        found = collectives_of(all_reduce(groups, "%y"), all_reduce("mesh['ep'=4,'tp'=2] {'tp'}", operand="%y"))[0]
        assert (found.axes, found.group) == expected, groups
    for pairs, axes in {
        "{0,1},{1,0},{2,3},{3,2}": ("tp",),
        "{0,2},{2,0},{1,3},{3,1}": ("gtp",),
        "{0,1},{1,2},{2,3},{3,0}": ("gtp", "tp"),
        "{0,3},{3,0}": (),
        "{0,1},{1,2}": (),
    }.items():
        for named, expected in (("mesh['gtp'=2,'tp'=2] {'tp'}", axes), ("{{0,1},{2,3}}", ())):
            permute = f"%y = f32[4]{{0}} collective-permute(%x), source_target_pairs={{{pairs}}}"
            assert collectives_of(permute, all_reduce(named, operand="%y"), ranks=4)[0].axes == expected, pairs


def test_a_collective_without_a_name_has_that_of_what_it_sends():
    negated = '%y = f32[4]{0} negate(%x), metadata={op_name="jit(f)/transpose(jvp())/neg"}'
    found = collectives_of(negated, all_reduce("{{0,1}}", "%z", "%y"), all_reduce("{{0,1}}"), ranks=2)
    assert [c.direction for c in found] == ["backward", "forward"]
    assert found[0].op_name == "jit(f)/transpose(jvp())/neg"


def test_table_counts_those_alike_together():
    text = stack(cpu_mesh(gtp=8), layers=3, size=128, rows=16, how="unrolled").compile().as_text()
    assert [times for _, times in hlo.summary(hlo.collectives(text))] == [3]
    lines = hlo.table(hlo.collectives(text)).splitlines()
    assert lines[2].split()[:5] == ["3", "all-gather", "forward", "gtp", "sync"]
    assert lines[2].split()[5:] == "u16 [16,128] 4.10 kB 32.8 kB 86.0 kB".split()
    assert lines[3] == "3 in total; 86.0 kB leave each device"
    assert hlo.table([]) == "no collectives"


# As XLA prints them: the types of what is combined, in a tuple, and for the start of an asynchronous one in two.
PARTS = "bf16[16,8]{1,0}", "bf16[16,4]{1,0}", "f32[16,2]{1,0:S(7)}"
WHOLE = "bf16[32,8]{1,0}", "bf16[32,4]{1,0}", "/*index=2*/f32[32,2]{1,0}"
COMBINED = {"all-gather": (PARTS, WHOLE), "reduce-scatter": (WHOLE, PARTS), "collective-permute": (PARTS, PARTS)}
BYTES = {PARTS: 16 * (2 * 8 + 2 * 4 + 4 * 2), WHOLE: 32 * (2 * 8 + 2 * 4 + 4 * 2)}


@pytest.mark.parametrize("form", ["synchronous", "start and done", "start alone"])
@pytest.mark.parametrize("kind", COMBINED)
def test_a_combined_collective_counts_every_array_with_its_bytes_and_dtype(kind, form):
    operands, results = COMBINED[kind]
    made = [f"%o{i} = {shape} bitcast(%x)" for i, shape in enumerate(operands)]
    into, out = f"({', '.join(operands)})", f"({', '.join(results)})"
    groups = "source_target_pairs={{0,1},{1,0}}" if kind == "collective-permute" else "replica_groups={{0,1}}"
    arguments = f"(%o0, %o1, /*index=2*/%o2), channel_id=1, {groups}, dimensions={{0}}"
    launch = {"synchronous": f"%c = {out} {kind}{arguments}"}.get(form, f"%c = ({into}, {out}) {kind}-start{arguments}")
    wait = [f"%d = {out} {kind}-done(%c)"] if form == "start and done" else []
    (found,) = collectives_of(*made, launch, *wait, ranks=2)
    for shapes, printed in ((found.operands, operands), (found.results, results)):
        rows = 16 if printed is PARTS else 32
        assert [str(shape) for shape in shapes] == [f"bf16[{rows},8]", f"bf16[{rows},4]", f"f32[{rows},2]"]
    assert (found.operand_bytes, found.result_bytes) == (BYTES[operands], BYTES[results])
    assert found.wire_bytes == BYTES[PARTS] and found.dtype == "bf16+f32"
    assert found.asynchronous == (form != "synchronous") and found.times == 1


def test_of_a_ragged_all_to_all_rows_count_once_and_where_they_begin_does_not():
    types = ["bf16[32,8]{1,0}", "bf16[64,8]{1,0:S(7)}", *["s64[2]{0}"] * 4]
    made = [f"%o{i} = {shape} bitcast(%x)" for i, shape in enumerate(types)]
    arguments = f"({', '.join(f'%o{i}' for i in range(6))}), replica_groups={{{{0,1}}}}"
    launch = f"%c = (({', '.join(types)}), {types[1]}) ragged-all-to-all-start{arguments}"
    (found,) = collectives_of(*made, launch, f"%d = {types[1]} ragged-all-to-all-done(%c)", ranks=2)
    assert len(found.operands) == 6 and found.dtype == "bf16"
    assert (found.operand_bytes, found.result_bytes) == (2 * 32 * 8, 2 * 64 * 8)
    assert found.wire_bytes == 2 * 64 * 8 // 2  # at worst, half of all rows that there is room for


@pytest.mark.full
@needs_target
def test_combined_collective_is_one_record_with_every_shape():
    mesh = h200_mesh()

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("gtp"), out_specs=P("gtp"), check_vma=False)
    def run(x, y):
        whole, other = lax.all_gather(x, "gtp", tiled=True), lax.all_gather(y, "gtp", tiled=True)
        scatter = partial(lax.psum_scatter, axis_name="gtp", tiled=True)
        return scatter(whole * 2), scatter(jnp.pad(whole, ((0, 0), (0, 24))) + 1), scatter(other * 3)

    shapes = array(mesh, (64, 40), P("gtp")), array(mesh, (64, 8), P("gtp"), jnp.float32)
    found = hlo.collectives(compiled_text(run.lower(*shapes)))
    (gather,) = [c for c in found if c.kind == "all-gather"]
    assert sorted(map(str, gather.results)) == ["bf16[64,40]", "f32[64,8]"] and gather.dtype == "bf16+f32"
    assert gather.result_bytes == 8 * gather.operand_bytes == 64 * (2 * 40 + 4 * 8)
    combined, alone = sorted((c for c in found if c.kind == "reduce-scatter"), key=lambda c: c.dtype)
    assert sorted(s.dims for s in combined.operands) == [(64, 40), (64, 64)]
    assert sorted(s.dims for s in combined.results) == [(8, 40), (8, 64)]
    assert combined.operand_bytes == 8 * combined.result_bytes == 2 * 64 * (40 + 64)
    assert alone.operand_bytes == 8 * alone.result_bytes == 4 * 64 * 8 and alone.dtype == "f32"


@pytest.mark.full
@needs_target
def test_collective_inside_a_kernel_is_found_and_asynchronous():
    """A small all-reduce becomes a kernel of its own on the GPU: a fusion that is started and waited for."""
    mesh = h200_mesh()
    total = partial(jax.shard_map, mesh=mesh, in_specs=P("gtp"), out_specs=P(), check_vma=False)
    run = jax.jit(total(lambda x: lax.psum(jnp.sum(x), "gtp")))
    (found,) = hlo.collectives(compiled_text(run.lower(array(mesh, (64,), P("gtp"), jnp.float32))))
    assert (found.kind, found.operand_bytes, found.result_bytes, found.group) == ("all-reduce", 4, 4, 8)
