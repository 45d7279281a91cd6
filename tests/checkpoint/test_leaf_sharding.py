"""Logical arrays stay cut: neither save nor restore gathers a weight."""

import math

import pytest
from jax.sharding import NamedSharding, PartitionSpec

import gtp_jax as gtp
from gtp_jax.checkpoint._leaf import _logical, _physical, even_sharding, leaves


@pytest.mark.parametrize("degrees", [{"gtp": 8}, {"gtp": 4, "tp": 2}], ids=["gtp8", "gtp4_tp2"])
def test_padded_weights_are_cut_over_all_devices_on_their_way(make_state, degrees):
    padded = [leaf for leaf in leaves(make_state(degrees)) if leaf.layout is not None]
    assert len(padded) >= 3 * 5
    for leaf in padded:
        stored = leaf.stored()
        assert math.prod(stored.sharding.shard_shape(stored.shape)) * 8 == stored.size, leaf.name
        out = _logical(leaf.layout, stored.sharding).lower(leaf.array).compile().as_text()
        back = _physical(leaf.layout, stored.sharding, leaf.array.sharding).lower(stored).compile().as_text()
        assert "all-gather" not in out + back, leaf.name


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((16, 5), PartitionSpec(("tp", "gtp"), None)),  # divides
        ((6, 8), PartitionSpec("tp", "gtp")),  # gtp moves
        ((5, 16), PartitionSpec(None, ("tp", "gtp"))),  # both move
        ((6, 5), PartitionSpec("tp", None)),  # gtp is dropped
    ],
)
def test_an_axis_that_does_not_divide_moves_or_is_dropped(shape, spec):
    mesh = gtp.make_mesh(gtp=4, tp=2)
    found = even_sharding(NamedSharding(mesh, PartitionSpec(("tp", "gtp"))), shape)
    assert found.is_equivalent_to(NamedSharding(mesh, spec), len(shape))
