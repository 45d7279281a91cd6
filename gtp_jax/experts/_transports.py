"""How tokens travel to the ranks of their experts: the one table.

| name | dispatch | combine | rows that a rank takes in |
|---|---|---|---|
| `gather` | all-gather of every token | all-to-all of every partial sum | ranks x tokens, to all |
| `padded` | all-to-all of slots for all tokens of a rank | the same back | ranks x tokens, of which some are real |
| `ragged` | ragged all-to-all of the rows that go somewhere | the same back | as many as come here |

Whichever it is, the same rows arrive, and partial sums are added in order of rank.

The rule below is measured for two ranks alone: on 2 x H200 `gather` makes a step of 12 layers of Qwen3-30B-A3B 1.10
times as fast as experts that are gathered (docs/experts.md). The rest follows from published figures for H100: within
a host an all-gather beats `ragged_all_to_all`, which launches a copy for each peer (marin#6979: 20.7 % of the peak
against 5.8 % at 8 ranks), and with 8 choices a token most tokens go to most ranks anyway; beyond a host its rows are
what travels through the network. XLA's CPU backend (jaxlib 0.12.0) has no ragged all-to-all.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax

from ..mesh import degrees, platform

Transport = Literal["gather", "padded", "ragged"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)

# GPUs of one host, which NVLink connects.
_HOST = 8


def choose_transport(axis: str, wanted: Transport | None = None) -> Transport:
    """Returns the transport over an axis of the mesh in scope.

    The ranks of later axes lie between those of `axis`. All of them together must fit into one host for `gather`.

    Args:
        axis: whose ranks divide the experts.
        wanted: what to take; `None` for what the table says.

    Raises:
        ValueError: if the devices have no such transport.
    """
    if wanted == "ragged" and platform() == "cpu":
        raise ValueError(
            "`transport` is 'ragged', which XLA has not for CPUs. Take 'gather' or 'padded', or `None` for what the "
            "table says."
        )
    if wanted is not None:
        return wanted
    if platform() != "gpu":
        return "padded"
    names = jax.sharding.get_abstract_mesh().axis_names
    return "gather" if degrees(names[names.index(axis) :]) <= _HOST else "ragged"


def check_transport(transport: object) -> None:
    """Refuses names that are none.

    Raises:
        ValueError: naming what there is.
    """
    if transport is not None and transport not in TRANSPORTS:
        raise ValueError(
            f"`transport` is {transport!r}; it must be one of {', '.join(map(repr, TRANSPORTS))}, or `None` for what "
            "the table says."
        )
