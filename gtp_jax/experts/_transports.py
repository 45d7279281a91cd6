"""Chooses how tokens travel to the ranks of their experts.

| name | dispatch | combine | rows that a rank receives |
|---|---|---|---|
| `gather` | all-gather of every token | all-to-all of every partial sum | ranks x tokens, on every rank |
| `padded` | all-to-all of slots for all tokens of a rank | the same in reverse | ranks x tokens, some of them real |
| `ragged` | ragged all-to-all of the rows that are needed | the same in reverse | only those that are needed |

With every transport, experts multiply the same rows, and partial sums are added in order of rank.

The rule in `choose_transport` was measured for two ranks only: on 2 x H200, `gather` makes a step of 12 layers of
Qwen3-30B-A3B 1.05 times as fast as gathering the experts (docs/experiments.md). The rest follows from published figures
for H100. Within a host, an all-gather beats `ragged_all_to_all`, which launches a copy for each peer (marin#6979: 20.7
% of the peak against 5.8 % at 8 ranks), and with 8 experts per token most tokens go to most ranks anyway. Across hosts,
`ragged_all_to_all` sends only the rows that are needed. XLA's CPU backend (jaxlib 0.12.0) does not support it.
"""

from __future__ import annotations

import jax

from .._words import GPUS_PER_HOST, TRANSPORTS, Transport
from ..mesh import degrees, platform


def choose_transport(axis: str, wanted: Transport | None = None) -> Transport:
    """Returns the transport over an axis of the mesh in scope.

    By default this is `padded` except on GPUs. On GPUs it is `gather` if all ranks of one group are on the same host,
    and otherwise `ragged`. The ranks of later mesh axes lie between those of `axis`, so they count toward the host's
    GPUs too.

    Args:
        axis: the mesh axis whose ranks divide the experts.
        wanted: the transport to use; `None` for the default.

    Raises:
        ValueError: if the devices do not support `wanted`.
    """
    if wanted == "ragged" and platform() == "cpu":
        raise ValueError(
            "`transport` is 'ragged', which XLA does not support on CPUs. Use 'gather' or 'padded', or `None` for the "
            "default."
        )
    if wanted is not None:
        return wanted
    if platform() != "gpu":
        return "padded"
    names = jax.sharding.get_abstract_mesh().axis_names
    return transport_within(degrees(names[names.index(axis) :]))


def transport_within(ranks: int, gpus_per_host: int = GPUS_PER_HOST) -> Transport:
    """Returns the transport between GPUs, by the number of neighboring ranks that contain those of a group."""
    return "gather" if ranks <= gpus_per_host else "ragged"


def check_transport(transport: object) -> None:
    """Refuses unknown names of transports.

    Raises:
        ValueError: if the name is unknown; the message names the allowed ones.
    """
    if transport is not None and transport not in TRANSPORTS:
        raise ValueError(
            f"`transport` is {transport!r}; it must be one of {', '.join(map(repr, TRANSPORTS))}, or `None` for the "
            "default."
        )
