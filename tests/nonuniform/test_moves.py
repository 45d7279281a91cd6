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

from gtp_jax.hlo import collectives
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


def padded_to(shape, spec, sizes):
    """The shape that every axis of a partition divides."""
    ways = [math.prod(sizes[axis] for axis in ((entry,) if isinstance(entry, str) else entry or ())) for entry in spec]
    ways += [1] * (len(shape) - len(ways))
    return tuple(-(-size // parts) * parts for size, parts in zip(shape, ways, strict=True))


@st.composite
def transfers(draw):
    """Arrays, some of another dtype, to a core of a grid or from it; padded where a partition does not divide them."""
    gtp, tp = draw(st.integers(1, 2)), draw(st.integers(1, 5))
    both, found = grids(gtp, tp, draw(st.integers(1, tp))), []
    for _ in range(draw(st.integers(1, 3))):
        shape, sides = tuple(draw(st.integers(1, most)) for most in (2, 20, 12)), []
        for grid in both:
            spec = draw(st.sampled_from(SPECS))
            stored = padded_to(shape, spec, {"gtp": len(grid), "tp": len(grid[0])})
            sides.append(boxes(stored, spec, grid))
        before, after = sides if draw(st.booleans()) else sides[::-1]
        found.append(LeafBoxes(np.dtype(draw(st.sampled_from(["float32", "int8"]))), before, after, shape))
    return found


def logical(box, shape):
    """A part without its padding."""
    return tuple((min(begin, size), min(end, size)) for (begin, end), size in zip(box, shape, strict=True))


@given(transfers())
def test_every_device_gets_what_it_stores_afterwards_once_and_padding_is_neither_sent_nor_kept(chosen):
    moves = plan_moves(chosen)
    for number, leaf in enumerate(chosen):
        shape = leaf.shape
        array, whole = np.arange(math.prod(shape)).reshape(shape), tuple((0, size) for size in shape)
        for device, box in leaf.after.items():
            found, times = np.full_like(array, -1), np.zeros_like(array)
            got = [(device, piece) for piece in moves.local[number][device]]
            for one in moves.rounds:
                for m in one.messages:
                    got += [(m.sender, p.box) for p in m.pieces if m.receiver == device and p.leaf == number]
            for sender, piece in got:
                assert piece == logical(piece, shape)
                own = logical(leaf.before[sender], shape)
                at = within(piece, whole)
                found[at] = array[within(own, whole)][within(piece, own)]
                times[at] += 1
            at = within(logical(box, shape), whole)
            np.testing.assert_array_equal(found[at], array[at])
            assert (times[at] == 1).all() and times.sum() == times[at].sum()


@given(transfers())
def test_rounds_are_partial_permutations_and_no_byte_is_sent_that_is_there_already(chosen):
    moves = plan_moves(chosen)
    for one in moves.rounds:
        senders, receivers = [m.sender for m in one.messages], [m.receiver for m in one.messages]
        assert len(set(senders)) == len(senders) and len(set(receivers)) == len(receivers)
        assert not any(m.sender == m.receiver for m in one.messages)
    lacking = 0
    for leaf in chosen:
        for device, box in leaf.after.items():
            have, box = leaf.before.get(device), logical(box, leaf.shape)
            common = 0 if have is None else _common(logical(have, leaf.shape), box)
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


@pytest.mark.parametrize(("gtp", "tp", "core_tp"), others_full([(2, 4, 3), (2, 2, 1)], [(2, 2, 1)]))
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
        moved = collectives(transfer.compile().as_text() or "")
        assert {c.kind for c in moved} == {"collective-permute"}
        assert sum(len(c.operands) for c in moved) == len(moves.rounds)


def _common(one, other):
    sizes = [max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(one, other, strict=True)]
    return math.prod(sizes)
