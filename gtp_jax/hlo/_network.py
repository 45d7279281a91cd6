"""Models how long a collective takes where NVLink joins the GPUs of a host, and a slower network joins hosts.

Each GPU sends at the rate of its NVLink within its host, and at that of its own network adapter beyond it, both at the
same time. A collective takes as long as the slower of the two. With `m` the smallest number of ranks of a group on one
host, and `W` the bytes that leave each rank:

- *all-gather, reduce-scatter, all-reduce* run as rings that visit host after host, as NCCL's do: `m` rings, each with
  `1 / m` of the data, and each leaving a host through a different one of the `m` adapters. Of `W`, `1 / m` travels
  over a rank's adapter, and the rest over NVLink. With one rank per host, everything travels over the network.
  Gathering over hosts first and within them afterwards would send less beyond hosts, by the factor `(n - m) / (n - 1)`
  for `n` ranks: 8/15 for two hosts of 8, 0.89 for 8 of them.
- *all-to-all*: `n - m` of a rank's `n - 1` peers are on other hosts, so the share `(n - m) / (n - 1)` of `W` travels
  over its adapter.
- *permutations and broadcasts*: some rank sends all of `W` to another host, and the others wait for it.

Ranks are numbered host by host. A group within a host uses NVLink alone. Latencies between hosts, congestion of
switches, and reductions in the network are left out.
"""

from __future__ import annotations

import collections
import dataclasses
import functools

from ._collectives import Collective
from ._groups import Groups

_RINGS = ("all-gather", "reduce-scatter", "all-reduce")
_PAIRWISE = ("all-to-all", "ragged-all-to-all")


@dataclasses.dataclass(frozen=True)
class Network:
    """The links between hosts.

    Attributes:
        rate: the rate at which each GPU sends beyond its host, in bytes per second and direction.
        gpus_per_host: the number of GPUs that NVLink joins.
    """

    rate: float
    gpus_per_host: int = 8

    def ranks_per_host(self, collective: Collective) -> int | None:
        """Returns the smallest number of ranks of a group that share a host, or `None` if no group spans hosts."""
        return _fewest_on_a_host(collective.groups, self.gpus_per_host)


@functools.cache
def _fewest_on_a_host(groups: Groups, gpus_per_host: int) -> int | None:
    hosts = (collections.Counter(rank // gpus_per_host for rank in group) for group in groups)
    return min((min(ranks.values()) for ranks in hosts if len(ranks) > 1), default=None)


def wire_seconds(collective: Collective, link_rate: float, network: Network | None = None) -> float:
    """Returns the modeled time of one run of a collective in seconds.

    Args:
        collective: the collective.
        link_rate: the rate at which a GPU sends over NVLink, in bytes per second.
        network: the links between hosts; `None` if NVLink joins all GPUs.
    """
    sent = collective.wire_bytes
    ranks = network.ranks_per_host(collective) if network else None
    if network is None or ranks is None:
        return sent / link_rate
    beyond = _share_beyond(collective, ranks)
    return max(sent * beyond / network.rate, sent * (1 - beyond) / link_rate)


def _share_beyond(collective: Collective, ranks_per_host: int) -> float:
    """Returns the share of the bytes leaving a rank that also leave its host, for the rank with the largest share."""
    if collective.kind in _RINGS:
        return 1 / ranks_per_host
    if collective.kind in _PAIRWISE:
        return (collective.group - ranks_per_host) / (collective.group - 1)
    return 1.0
