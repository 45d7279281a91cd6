"""Transfers, planned: what arrives is what is wanted, and as little is sent as can be."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from selection import others_full

from gtp_jax.nonuniform import LeafBoxes, Transfer, box_of, plan_moves
from gtp_jax.nonuniform._boxes import elements, within
from gtp_jax.nonuniform._faults import core_ranks

# every way in which two axes may shard a matrix behind a dimension of layers
SPECS = [
    PartitionSpec(*entries)
    for entries in [
        (),
        (None, "tp"),
        (None, None, "tp"),
        (None, "gtp"),
        (None, "gtp", "tp"),
        (None, "tp", "gtp"),
        (None, ("tp", "gtp")),
        (None, None, ("tp", "gtp")),
    ]
]


def boxes(shape, spec, grid):
    """The part of each device of a grid (gtp rows of tp), by number."""
    sizes = {"gtp": len(grid), "tp": len(grid[0])}
    return {
        number: box_of(shape, spec, sizes, {"gtp": g, "tp": t})
        for g, row in enumerate(grid)
        for t, number in enumerate(row)
    }


def grids(gtp, tp, core_tp):
    whole = [[g * tp + t for t in range(tp)] for g in range(gtp)]
    return whole, [[row[t] for t in core_ranks(tp, core_tp)] for row in whole]


@st.composite
def leaves(draw, gtp, tp, core_tp):
    """Arrays that every partition divides, some of them large and some of them of another dtype."""
    size = math.lcm(gtp * tp, gtp * core_tp)
    whole, core = grids(gtp, tp, core_tp)
    found = []
    for _ in range(draw(st.integers(1, 3))):
        shape = (draw(st.integers(1, 2)), size * draw(st.integers(1, 2)), size)
        one, other = draw(st.sampled_from(SPECS)), draw(st.sampled_from(SPECS))
        dtype = np.dtype(draw(st.sampled_from(["float32", "int8"])))
        before, after = (boxes(shape, one, whole), boxes(shape, other, core))
        if draw(st.booleans()):
            before, after = boxes(shape, other, core), boxes(shape, one, whole)
        found.append((shape, LeafBoxes(dtype, before, after)))
    return found


@st.composite
def transfers(draw):
    gtp, tp = draw(st.integers(1, 2)), draw(st.integers(1, 5))
    return draw(leaves(gtp, tp, draw(st.integers(1, tp))))


@given(transfers())
def test_every_device_gets_what_it_stores_afterwards_once(chosen):
    moves = plan_moves([leaf for _, leaf in chosen])
    arrays = [np.arange(math.prod(shape)).reshape(shape) for shape, _ in chosen]
    whole = [tuple((0, n) for n in shape) for shape, _ in chosen]
    for number, (leaf, array) in enumerate(zip(moves.leaves, arrays, strict=True)):
        for device, box in leaf.after.items():
            found, times = np.full_like(array, -1), np.zeros_like(array)
            got = [(device, piece) for piece in moves.local[number][device]]
            for one in moves.rounds:
                for m in one.messages:
                    got += [(m.sender, p.box) for p in m.pieces if m.receiver == device and p.leaf == number]
            for sender, piece in got:
                at = within(piece, whole[number])
                within_sender = array[within(leaf.before[sender], whole[number])]
                found[at] = within_sender[within(piece, leaf.before[sender])]
                times[at] += 1
            at = within(box, whole[number])
            np.testing.assert_array_equal(found[at], array[at])
            assert (times[at] == 1).all()


@given(transfers())
def test_rounds_are_partial_permutations_and_no_byte_is_sent_that_is_there_already(chosen):
    moves = plan_moves([leaf for _, leaf in chosen])
    for one in moves.rounds:
        senders, receivers = [m.sender for m in one.messages], [m.receiver for m in one.messages]
        assert len(set(senders)) == len(senders) and len(set(receivers)) == len(receivers)
        assert not any(m.sender == m.receiver for m in one.messages)
    lacking = 0
    for leaf in moves.leaves:
        for device, box in leaf.after.items():
            have = leaf.before.get(device)
            common = 0 if have is None else _common(have, box)
            lacking += (elements(box) - common) * leaf.dtype.itemsize
    assert moves.bytes_needed == lacking <= moves.bytes_moved
    assert sum(moves.sent().values()) == sum(moves.received().values())


@pytest.mark.parametrize(
    ("tp", "core_tp", "in_turn"),  # in units of a shard
    [(4, 3, 1), (4, 2, 1), (2, 1, 1), (6, 5, 1), (6, 4, 1), (3, 2, 1), (3, 1, 2)],
)
def test_no_device_sends_more_than_its_shard(tp, core_tp, in_turn):
    """A device that stores nothing afterwards sends its shard whatever the layouts; contiguous runs cost no more."""
    shape = (60, 5)
    whole, core = grids(1, tp, core_tp)
    spec = PartitionSpec("tp")
    moves = plan_moves([LeafBoxes(np.dtype("int8"), boxes(shape, spec, whole), boxes(shape, spec, core))])
    shard = 60 // tp * 5
    assert max(moves.sent().values()) == shard
    assert moves.bytes_in_turn == in_turn * shard


@pytest.mark.parametrize("spec", SPECS)
def test_parts_are_those_of_a_named_sharding(spec):
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("gtp", "tp"))
    shape = (2, 12, 6)
    found = boxes(shape, spec, [[0, 1, 2], [3, 4, 5]])
    for device, index in NamedSharding(mesh, spec).devices_indices_map(shape).items():
        theirs = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        assert found[jax.devices().index(device)] == theirs


@pytest.mark.parametrize(("gtp", "tp", "core_tp"), others_full([(1, 4, 3), (2, 4, 3), (1, 2, 1)], [(2, 4, 3)]))
def test_a_transfer_moves_bits_by_permutes_alone(gtp, tp, core_tp, key):
    whole, core = grids(gtp, tp, core_tp)
    devices = jax.devices()[: gtp * tp]
    size = math.lcm(gtp * tp, gtp * core_tp)
    kinds = [
        ("column", (2, size, 6), PartitionSpec(None, ("tp", "gtp")), PartitionSpec(None, ("tp", "gtp"))),
        ("row", (6, size), PartitionSpec(None, "tp"), PartitionSpec(None, "tp")),
        ("turned", (size, size), PartitionSpec("tp", "gtp"), PartitionSpec("gtp", "tp")),
        ("whole before", (size,), PartitionSpec(), PartitionSpec("tp")),
        ("a norm's scale", (5,), PartitionSpec(), PartitionSpec()),
        ("bits", (size,), PartitionSpec("tp"), PartitionSpec(("tp", "gtp"))),
    ]
    arrays = [jax.random.normal(jax.random.fold_in(key, i), shape) for i, (_, shape, _, _) in enumerate(kinds)]
    arrays[-1] = jax.random.bits(key, arrays[-1].shape, "uint8")
    meshes = [Mesh(np.array([[devices[n] for n in row] for row in grid]), ("gtp", "tp")) for grid in (whole, core)]
    for way in (1, -1):  # to the core and back
        (before_grid, after_grid), (before_mesh, after_mesh) = (whole, core)[::way], tuple(meshes)[::way]
        specs = [(one, other)[::way] for _, _, one, other in kinds]
        moves = plan_moves(
            [
                LeafBoxes(a.dtype, boxes(a.shape, one, before_grid), boxes(a.shape, other, after_grid))
                for a, (one, other) in zip(arrays, specs, strict=True)
            ]
        )
        transfer = Transfer(moves, devices)
        stored = [jax.device_put(a, NamedSharding(before_mesh, one)) for a, (one, _) in zip(arrays, specs, strict=True)]
        parts = [{shard.device: shard.data for shard in a.addressable_shards} for a in stored]
        for a, found, (_, other), kind in zip(arrays, transfer(parts), specs, kinds, strict=True):
            sharding = NamedSharding(after_mesh, other)
            assert set(found) == set(sharding.device_set), kind[0]
            back = jax.make_array_from_single_device_arrays(a.shape, sharding, list(found.values()))
            np.testing.assert_array_equal(np.asarray(back), np.asarray(a), err_msg=kind[0])
        text = transfer.compile().as_text() or ""
        count = text.count(" collective-permute(") + text.count(" collective-permute-start(")
        assert count == len(moves.rounds)
        for other in ("all-gather", "all-to-all", "all-reduce", "reduce-scatter"):
            assert f" {other}(" not in text and f" {other}-start(" not in text


def _common(one, other):
    sizes = [max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(one, other, strict=True)]
    return math.prod(sizes)
