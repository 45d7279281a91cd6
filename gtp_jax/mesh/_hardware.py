"""Determines the capabilities of the devices of the mesh in scope.

The mesh takes precedence over the devices of this machine, because a program may be compiled for GPUs on a machine that
has none.
"""

from __future__ import annotations

import re

import jax

# Names of GPUs by compute capability, from developer.nvidia.com/cuda/gpus. Needed for ahead-of-time compilation, where
# a device has a name but no compute capability (jax.experimental.topologies, jax 0.11.2 and 0.12.0).
_CAPABILITIES: dict[tuple[int, int], tuple[str, ...]] = {
    (7, 0): ("V100",),
    (7, 5): ("T4", "RTX 2060", "RTX 2070", "RTX 2080"),
    (8, 0): ("A100", "A30", "A800"),
    (8, 6): ("A2", "A10", "A16", "A40", "RTX A6000", "RTX 3080", "RTX 3090"),
    (8, 9): ("L4", "L40", "L40S", "RTX 4080", "RTX 4090", "RTX 6000 Ada"),
    (9, 0): ("H100", "H200", "GH200", "H800", "H20"),
    (10, 0): ("B200", "GB200"),
    (10, 3): ("B300", "GB300"),
}


def platform() -> str:
    """Returns `gpu` or `cpu`: the platform of the mesh in scope, or of the default backend if there is no such mesh."""
    name = _fact("platform")
    return "gpu" if name in ("gpu", "cuda") else name


def supports_block_scaled_matmul() -> bool:
    """Returns whether the GPUs have block-scaled matmuls in hardware: compute capability 10.x (B200 and B300)."""
    return platform() == "gpu" and _capability()[0] == 10


def supports_fp8_matmul() -> bool:
    """Returns whether the GPUs have FP8 matmuls in hardware: compute capability 8.9 or later (L40, H100)."""
    return platform() == "gpu" and _capability() >= (8, 9)


def supports_grouped_matmul() -> bool:
    """Returns whether the GPUs run this library's CUDA kernels for grouped matmuls: compute capability 9.0 (H100)."""
    return platform() == "gpu" and _capability() == (9, 0)


def largest_attention_head() -> int:
    """Returns the largest head dimension that cuDNN's fused attention supports on these GPUs, according to jax 0.12.0:
    256 from compute capability 9.0, 128 from 8.0, and 0 (no support) before that. On a machine without GPUs, jax allows
    only 128, whatever GPUs it compiles for."""
    if _capability() < (8, 0):
        return 0
    return 256 if _capability() >= (9, 0) and jax.default_backend() == "gpu" else 128


def supports_packed_attention() -> bool:
    """Returns whether cuDNN's attention supports packed documents on these GPUs, according to jax 0.12.0: compute
    capability 9.0 or later (H100)."""
    return platform() == "gpu" and _capability() >= (9, 0)


def runs_kernels() -> bool:
    """Returns whether this library's kernels support these devices: CPUs, and GPUs of compute capability 8.0 or later
    (A100)."""
    return platform() != "gpu" or _capability() >= (8, 0)


def _capability() -> tuple[int, int]:
    """Returns the compute capability of the GPUs: that of a device of the same kind if this run has one; otherwise, it
    is looked up by name.

    Raises:
        ValueError: if this run has no such device, and the name is not known.
    """
    kind = _fact("device_kind")
    for device in jax.devices():
        if device.device_kind == kind and hasattr(device, "compute_capability"):
            major, minor = device.compute_capability.split(".")
            return int(major), int(minor)
    for capability, names in _CAPABILITIES.items():
        if re.search(rf"\b({'|'.join(names)})\b", kind):
            return capability
    raise ValueError(
        f"the mesh in scope has devices of the kind {kind!r}, whose compute capability is not known, and this machine "
        f"has none. Compile on a machine that has one, or for one of {', '.join(sum(_CAPABILITIES.values(), ()))}."
    )


def _fact(name: str) -> str:
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(jax.devices()[0] if device is None else device, name)
