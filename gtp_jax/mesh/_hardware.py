"""Says what the devices of the mesh in scope can do.

The mesh is asked first, because a program may be compiled for GPUs on a machine that has none.
"""

from __future__ import annotations

import re

import jax

# Compute capabilities by name, from developer.nvidia.com/cuda/gpus: a device that a program is only compiled for has a
# name and no compute capability (jax.experimental.topologies, jax 0.11.2 and 0.12.0).
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
    """Returns `gpu` or `cpu`: what the mesh in scope consists of, else the default backend."""
    name = _fact("platform")
    return "gpu" if name in ("gpu", "cuda") else name


def supports_block_scaled_matmul() -> bool:
    """Returns whether the GPUs multiply codes and block scales in hardware: compute capability 10.x, B200 and B300."""
    return platform() == "gpu" and _capability()[0] == 10


def supports_fp8_matmul() -> bool:
    """Returns whether the GPUs multiply FP8 in hardware: compute capability 8.9 and later, L40, H100."""
    return platform() == "gpu" and _capability() >= (8, 9)


def supports_grouped_matmul() -> bool:
    """Returns whether this library's CUDA kernels for grouped matmuls run on the GPUs: compute capability 9.0, H100."""
    return platform() == "gpu" and _capability() == (9, 0)


def largest_attention_head() -> int:
    """Returns the largest head that cuDNN's fused attention takes on these GPUs, as jax 0.12.0 has it: 256 from compute
    capability 9.0 on, 128 from 8.0, none before. Of GPUs that are not here jax assumes the less."""
    if _capability() < (8, 0):
        return 0
    return 256 if _capability() >= (9, 0) and jax.default_backend() == "gpu" else 128


def supports_packed_attention() -> bool:
    """Returns whether cuDNN's attention takes packed documents on these GPUs, as jax 0.12.0 has it: from compute
    capability 9.0 on, H100."""
    return platform() == "gpu" and _capability() >= (9, 0)


def runs_kernels() -> bool:
    """Returns whether this library's kernels are for these devices: GPUs of compute capability 8.0 and later, A100."""
    return platform() != "gpu" or _capability() >= (8, 0)


def _capability() -> tuple[int, int]:
    """Returns the compute capability of the GPUs: as a device of the same kind says, else by name.

    Raises:
        ValueError: if there is no such device here, and the name says nothing.
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
        f"the mesh in scope has devices of the kind {kind!r}, none of which is here to say its compute capability. "
        f"Compile on a machine that has one, or for one of {', '.join(sum(_CAPABILITIES.values(), ()))}."
    )


def _fact(name: str) -> str:
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(jax.devices()[0] if device is None else device, name)
