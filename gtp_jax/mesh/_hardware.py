"""What the devices of the mesh in scope can do.

Asked of the mesh first, because a program may be compiled for GPUs on a machine that has none. A device that is not
there has no compute capability, but a name.
"""

from __future__ import annotations

import re

import jax

# Names of GPUs. What is not here is newer.
_BEFORE_AMPERE = r"\b(V100|T4|[PKM]\d+|GTX|TITAN|Quadro|RTX 20\d\d)\b"
_AMPERE = r"\b(A\d+[A-Z]?|RTX 30\d\d)\b"
_BLACKWELL = r"\bG?B[123]0\d"


def platform() -> str:
    """`gpu` or `cpu`: what the mesh in scope consists of, else the default backend."""
    name = _device("platform")
    return "gpu" if name in ("gpu", "cuda") else name


def multiplies_blocks() -> bool:
    """Whether the GPUs multiply codes and block scales in hardware: SM100 and on, B200 and kin."""
    return platform() == "gpu" and _is(_BLACKWELL)


def multiplies_fp8() -> bool:
    """Whether the GPUs multiply FP8 in hardware: compute capability 8.9 and on, L40, H100 and later."""
    return platform() == "gpu" and not _is(_BEFORE_AMPERE) and not _is(_AMPERE)


def runs_kernels() -> bool:
    """Whether this library's kernels are for these devices: GPUs of compute capability 8.0 and on, A100 and later."""
    return platform() != "gpu" or not _is(_BEFORE_AMPERE)


def _is(names: str) -> bool:
    return re.search(names, _device("device_kind")) is not None


def _device(fact: str) -> str:
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(jax.devices()[0] if device is None else device, fact)
