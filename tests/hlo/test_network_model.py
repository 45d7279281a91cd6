"""Times of collectives that span hosts, against sums by hand; and the groups of ranks from which they follow."""

from __future__ import annotations

import pytest

from gtp_jax import hlo
from gtp_jax.hlo import Collective, Event, LaunchOrder, Network, Shape
from gtp_jax.hlo._groups import replica_groups
from gtp_jax.hlo._network import wire_seconds

NVLINK, NETWORK = 400e9, Network(50e9)


def consecutive(ranks: int, group: int) -> tuple[tuple[int, ...], ...]:
    """Groups of neighbours."""
    return tuple(tuple(range(first, first + group)) for first in range(0, ranks, group))


def apart(ranks: int, stride: int) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks that are `stride` apart, as of an axis with `stride` ranks inside it."""
    return tuple(tuple(range(first, ranks, stride)) for first in range(stride))


def sent(kind: str, groups: tuple[tuple[int, ...], ...], gigabytes: float) -> Collective:
    """A collective whose larger side has this size on each device."""
    whole, part = (Shape("u8", (round(gigabytes * 1e9 / n),)) for n in (1, len(groups[0])))
    operand, result = {
        "all-gather": (part, whole),
        "reduce-scatter": (whole, part),
    }.get(kind, (whole, whole))
    return Collective(kind, kind, (operand,), (result,), groups, (), False, 1, True, "forward", "")


def ms(collective: Collective, network: Network | None = NETWORK) -> float:
    return 1e3 * wire_seconds(collective, NVLINK, network)


@pytest.mark.parametrize(
    ("kind", "groups", "gigabytes", "expected"),
    [
        # gtp 64 x tp 8: one rank of a gtp group per host, so all 63 shards of 1 MB pass its adapter: 63 MB / 50 GB/s
        ("all-gather", apart(512, 8), 0.064, 1.26),
        ("reduce-scatter", apart(512, 8), 0.064, 1.26),
        ("all-reduce", apart(512, 8), 0.064, 2.52),
        # tp 8 within a host: 7/8 of 64 MB at 400 GB/s
        ("all-gather", consecutive(512, 8), 0.064, 0.14),
        # gtp 16 on two hosts: 8 adapters share 60 MB, 7.5 MB / 50 GB/s = 0.15 ms; over NVLink 52.5 MB take 0.13
        ("all-gather", consecutive(16, 16), 0.064, 0.15),
        ("reduce-scatter", consecutive(16, 16), 0.064, 0.15),
        # gtp 16 x tp 4 on 8 hosts: two ranks of a group per host, half of 60 MB / 50 GB/s
        ("all-gather", apart(64, 4), 0.064, 0.6),
        # of 15 other ranks, 8 are on the other host: 8 x 4 MB / 50 GB/s, where 7 x 4 MB over NVLink take 0.07
        ("all-to-all", consecutive(16, 16), 0.064, 0.64),
        ("all-to-all", consecutive(16, 8), 0.064, 0.14),
        # rank 7 sends all of its part to rank 8
        ("collective-permute", consecutive(16, 16), 0.064, 1.28),
        ("collective-permute", consecutive(16, 8), 0.064, 0.16),
        ("collective-broadcast", apart(512, 8), 0.064, 1.28),
        # ranks 6 and 7 of the second group are on one host, 8 to 11 on the next: two adapters carry 50 MB
        ("all-gather", consecutive(12, 6), 0.06, 0.5),
    ],
)
def test_collective_takes_as_long_as_the_slower_of_nvlink_and_adapter(kind, groups, gigabytes, expected):
    assert ms(sent(kind, groups, gigabytes)) == pytest.approx(expected, rel=1e-6)


def test_nvlink_bounds_a_ring_where_the_network_is_fast():
    gather = sent("all-gather", consecutive(16, 16), 0.064)
    assert ms(gather, Network(400e9)) == pytest.approx(1e3 * 60e6 * 7 / 8 / 400e9)
    assert ms(gather, None) == pytest.approx(0.15) and ms(gather, Network(1.0, 16)) == pytest.approx(0.15)


def test_hosts_of_another_size_change_what_leaves_them():
    gather = sent("all-gather", consecutive(16, 16), 0.064)
    assert ms(gather, Network(50e9, 4)) == pytest.approx(1e3 * 60e6 / 4 / 50e9)
    assert NETWORK.ranks_per_host(gather) == 8 and Network(50e9, 16).ranks_per_host(gather) is None


def test_timeline_with_a_network_exposes_what_the_matmul_does_not_hide():
    """A gather of 63 MB takes 193 us over NVLink, and 1260 us over the network, under the second matmul of 1000 us."""
    gather = sent("all-gather", apart(512, 8), 0.064)
    flops = round(1e-3 * hlo.fact("h200", "bf16_ceiling").value)
    late = 1e6 * hlo.fact("h200", "link_latency").value
    events = (
        Event("all-gather", "g", 0, 3, (), 0, 1, "forward", collective=gather),
        *(Event("matmul", f"m{at}", at, at, (), 0, 1, "forward", flops=flops, rate="bf16 matmuls") for at in (1, 2)),
    )
    near, far = (hlo.timeline(LaunchOrder(events), "h200", network) for network in (None, NETWORK))
    assert (near.exposed_us, near.communication_us) == pytest.approx((0.0, late + 63e6 / 326e3))
    expected = (late + 260.0, late + 1260.0, late + 2260.0)
    assert (far.exposed_us, far.communication_us, far.total_us) == pytest.approx(expected, rel=1e-6)
    assert near.network is None and far.network == NETWORK


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups=mesh['gtp'=2,'tp'=2] {'gtp'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['gtp'=2,'tp'=2] {'tp'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['dp'=2,'gtp'=2,'tp'=2] {'tp','dp'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("replica_groups=mesh['gtp'=8] {'gtp':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['gtp'=8] {'gtp':(1)2,'gtp':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups={{0,3},{1,2}}", ((0, 3), (1, 2))),
        ("source_target_pairs={{0,1},{2,3},{1,0},{3,2}}", ((0, 1), (2, 3))),
        ("source_target_pairs={{0,1},{2,3},{1,2}}", ((0, 1, 2, 3),)),
        ("replica_groups={}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
    ],
)
def test_ranks_of_a_group_are_read_in_every_notation(text, groups):
    found = {tuple(sorted(group)) for group in replica_groups(text, 8)}
    assert found == set(groups)


def test_ranks_of_a_mesh_are_grouped_as_the_compiler_groups_them():
    sizes = {"dp": 2, "gtp": 2, "tp": 2}
    for axes in (["tp"], ["gtp"], ["dp", "tp"], ["gtp", "dp"]):
        text = f"replica_groups=mesh['dp'=2,'gtp'=2,'tp'=2] {{{','.join(map(repr, axes))}}}"
        assert set(hlo.groups_over(sizes, axes)) == {tuple(sorted(group)) for group in replica_groups(text, 8)}
