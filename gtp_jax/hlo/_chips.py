"""Facts about chips, each number with its unit and source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_H200 = "NVIDIA H200 datasheet, SXM"
_H100 = "NVIDIA H100 datasheet, SXM5"
_MEASURED = "measured on 8 x H200 joined by NVLink, jax 0.11.2"
_ONE_H200 = "measured on one H200"
_ONE_H100 = "measured on one H100"
_TWO_H100 = "measured on 2 x H100"
_MATMULS = "150 matmuls of 8192 x 8192 x 8192 in a row, which power bounds as it bounds a step"
_ATTENTION = "cuDNN in bfloat16, 8192 tokens, 32 heads of 128, causal"
_LATENCY = "beyond its bytes; gathers of four arrays, 109 MB in all, that nothing hid took 0.4 ms on 2 x H100"


class Fact(NamedTuple):
    """A number with its unit and source."""

    value: float
    unit: str
    source: str


# Rates in steps with the state on the host, over PCIe 5 x16, which an H100 has too.
_HOST_LINK = {
    "host_link_ceiling": Fact(55e9, "B/s", f"{_ONE_H200}: 5.1 GB of parameters, copied to it alone"),
    "host_link_both_ceiling": Fact(35e9, "B/s", f"{_ONE_H200}: 10.1 GB of moments, in blocks, both ways at once"),
}

# `ceiling` is the rate that a measurement reached, `peak` the rate of the datasheet. Rates of links are per direction.
# The latency of a link is what each array of a collective takes beyond its bytes.
CHIPS: Mapping[str, Mapping[str, Fact]] = {
    "h200": {
        "bf16_peak": Fact(989e12, "FLOP/s", _H200),
        "bf16_ceiling": Fact(711e12, "FLOP/s", f"{_ONE_H200}: {_MATMULS}; 787e12 alone"),
        "fp8_ceiling": Fact(1471e12, "FLOP/s", f"{_MEASURED}: matmul of 8192 x 8192 x 8192"),
        "attention_forward_ceiling": Fact(
            594e12, "FLOP/s", f"{_ONE_H200}: {_ATTENTION}; 494e12 at 2048, 611e12 at 65536"
        ),
        "attention_backward_ceiling": Fact(
            468e12, "FLOP/s", f"{_ONE_H200}: {_ATTENTION}; 348e12 at 2048, 549e12 at 65536"
        ),
        "fp8_attention_forward_ceiling": Fact(774e12, "FLOP/s", f"{_ONE_H200}: 8192 tokens, 32 heads of 128, causal"),
        "memory": Fact(151_397_597_184, "B", "XLA's target description of the chip"),
        "memory_rate": Fact(4.8e12, "B/s", _H200),
        "memory_ceiling": Fact(4.1e12, "B/s", f"{_ONE_H200}: a copy of 256 MiB, read and written"),
        **_HOST_LINK,
        "host_link_peak": Fact(64e9, "B/s", f"{_H200}: PCIe Gen5, 128 GB/s, both directions together"),
        "link_ceiling": Fact(326e9, "B/s", f"{_MEASURED}: all-gather of 512 MB; 114e9 at 64 MB, 14e9 at 8 MB"),
        "link_latency": Fact(17e-6, "s", _LATENCY),
    },
    "h100": {
        "bf16_peak": Fact(989e12, "FLOP/s", _H100),
        "bf16_ceiling": Fact(707e12, "FLOP/s", f"{_ONE_H100}: {_MATMULS}; 798e12 alone"),
        "fp8_ceiling": Fact(1453e12, "FLOP/s", f"{_TWO_H100}: 172 TFLOP of matmuls of an FP8 step took 118 ms"),
        "attention_forward_ceiling": Fact(
            582e12, "FLOP/s", f"{_ONE_H100}: {_ATTENTION}; 476e12 at 2048, 609e12 at 65536"
        ),
        "attention_backward_ceiling": Fact(
            464e12, "FLOP/s", f"{_ONE_H100}: {_ATTENTION}; 323e12 at 2048, 532e12 at 65536"
        ),
        "fp8_attention_forward_ceiling": Fact(774e12, "FLOP/s", f"{_ONE_H200}: 8192 tokens, 32 heads of 128, causal"),
        "memory": Fact(84_942_979_072, "B", "XLA's target description of the chip"),
        "memory_rate": Fact(3.35e12, "B/s", _H100),
        "memory_ceiling": Fact(3.0e12, "B/s", _TWO_H100),
        **_HOST_LINK,
        "host_link_peak": Fact(64e9, "B/s", f"{_H100}: PCIe Gen5, 128 GB/s, both directions together"),
        "link_ceiling": Fact(329e9, "B/s", _TWO_H100),
        "link_latency": Fact(17e-6, "s", _LATENCY),
    },
}

# The fact that bounds each kind of work.
RATES: Mapping[str, str] = {
    "bf16 matmuls": "bf16_ceiling",
    "FP8 matmuls": "fp8_ceiling",
    "attention forward": "attention_forward_ceiling",
    "attention backward": "attention_backward_ceiling",
    "FP8 attention forward": "fp8_attention_forward_ceiling",
    "elementwise work": "memory_ceiling",
}


def fact(chip: str, name: str) -> Fact:
    """Returns a fact about a chip.

    Raises:
        ValueError: if the chip or the fact is unknown.
    """
    if chip not in CHIPS:
        raise ValueError(f"unknown chip {chip!r}; the known chips are {', '.join(sorted(CHIPS))}.")
    if name not in CHIPS[chip]:
        raise ValueError(f"`name` is {name!r}; the known facts about {chip!r} are {', '.join(CHIPS[chip])}.")
    return CHIPS[chip][name]
