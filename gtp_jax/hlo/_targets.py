"""Describes the devices of another machine, in order to compile for GPUs on a laptop.

XLA can compile for a GPU from a description alone. In addition to jax, this needs the CUDA plugin; `ptxas` and
`libdevice`, to assemble kernels; and cuDNN, for its version if a program calls its attention. It needs no driver and no
GPU. The compiled program can be inspected, but not run. The schedule is that of XLA's cost model. Because nothing can
be timed, matmuls are not autotuned, and the peak of memory may differ by about 10 % from that on the machine.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.experimental import topologies

from .._words import GPUS_PER_HOST
from ._chips import CHIPS, fact

# The distributions that compiling for a GPU needs, and their purpose. The extra `gtp_jax[target]` installs them.
REQUIRED = {
    "jax-cuda13-plugin": "XLA's CUDA compiler",
    "nvidia-cuda-nvcc": "ptxas",
    "nvidia-nvvm": "libdevice",
    "nvidia-cudnn-cu13": "cuDNN attention",
}

# The options of `lower(...).compile(...)` for a target. Triton's matmuls are disabled: their tiles are chosen by timing
# them on a GPU, and without one, Triton would split matmuls that should not be split. Custom calls are mocked, so XLA
# does not check that FFI kernels exist.
COMPILE_OPTIONS: Mapping[str, bool] = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_mock_custom_calls": True,
}

_RUNTIME = "13.0.0"
_SYNTAX = "CHIP:DEVICES, such as `h200:8`: a part of one host, or whole hosts"

# The rates of the units of a Hopper SM, by XLA's number of the element type: the number of units per SM, and the
# operations per clock of each.
_SCALAR_CLOCK_GHZ = 1.98
_SCALAR_UNITS = {
    4: (64, 1),  # s32
    8: (64, 1),  # u32
    10: (128, 2),  # f16
    11: (128, 1),  # f32
    12: (64, 1),  # f64
    16: (128, 2),  # bf16
}
_MATRIX_CLOCK_GHZ = 1.8295201  # at which 132 SMs x 4 units x 512 x 2 is the 989 TFLOP/s of the datasheet
_MATRIX_UNITS = {
    2: (4, 1024),  # s8
    6: (4, 1024),  # u8
    10: (4, 512),  # f16
    11: (4, 256),  # f32, as TF32
    12: (4, 32),  # f64
    16: (4, 512),  # bf16
    19: (4, 1024),  # f8e5m2
    20: (4, 1024),  # f8e4m3fn
}

# Facts of a Hopper GPU in the SXM form factor, by the fields of XLA's `GpuDeviceInfoProto`. Sizes are in bytes.
_HOPPER = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_core": 233472,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "l2_cache_size": 52428800,
    "clock_rate_ghz": _SCALAR_CLOCK_GHZ,
    "device_address_bits": 64,
    "pcie_bandwidth": 34359738368,
    "ecc_enabled": "true",
    "collective_memory_granularity": 2097152,
    "device_vendor": '"NVIDIA Corporation"',
    "platform_version": '"Compute Capability 9.0a"',
    "driver_version": f'"{_RUNTIME}"',
    "runtime_version": f'"{_RUNTIME}"',
    "compile_time_toolkit_version": f'"{_RUNTIME}"',
}
_NVLINKS = 18


class Target(NamedTuple):
    """A machine to compile for.

    Attributes:
        chip: a key of `CHIPS`.
        hosts: the number of hosts.
        devices: the number of devices of all hosts together.
    """

    chip: str
    hosts: int
    devices: int


def parse_target(text: str, gpus_per_host: int = GPUS_PER_HOST) -> Target:
    """Parses a target such as `h200:8`, or `h200:512` for 64 hosts of 8.

    Raises:
        ValueError: if the text is not of this form, the chip is unknown, or the devices do not fill their hosts.
    """
    match = re.fullmatch(r"(\w+):([1-9]\d*)", text)
    if not match:
        raise ValueError(f"`target` is {text!r}; expected {_SYNTAX}. Chips: {', '.join(sorted(CHIPS))}.")
    chip, devices = match[1].lower(), int(match[2])
    if chip not in CHIPS:
        raise ValueError(f"`target` {text!r} names the chip {chip!r}; the known chips are {', '.join(sorted(CHIPS))}.")
    if devices > gpus_per_host and devices % gpus_per_host:
        raise ValueError(
            f"`target` {text!r} has {devices} devices, which do not fill hosts of {gpus_per_host}. "
            f"Choose up to {gpus_per_host} devices, or a multiple of that."
        )
    return Target(chip, -(-devices // gpus_per_host), devices)


def missing_packages() -> dict[str, str]:
    """Returns the packages that compiling for a GPU needs and that are not installed, with the purpose of each."""
    found = importlib.metadata.Distribution.discover
    return {name: use for name, use in REQUIRED.items() if not any(found(name=name))}


@functools.cache
def topology_devices(target: Target) -> tuple[Any, ...]:
    """Returns the devices of a target, from which a mesh can be built. Compile for them with `COMPILE_OPTIONS`.

    Raises:
        ModuleNotFoundError: if packages are missing, because without them the compiler could abort the process.
        RuntimeError: if jax was not told to run on the CPU, so its plugin looked for a driver and failed.
    """
    missing = missing_packages()
    if missing:
        listed = ", ".join(f"{name} ({use})" for name, use in missing.items())
        raise ModuleNotFoundError(
            f"compiling for {target.chip} needs packages that are not installed: {listed}. "
            'Install them with `pip install "gtp_jax[target]"`; they need no GPU and no driver.'
        )
    shape = f"1x{target.hosts}x{target.devices // target.hosts}"  # partitions x hosts x devices of a host
    try:
        description = _description(target.chip)
        described = topologies.get_topology_desc(platform="cuda", target_config=description, topology=shape)
    except NotImplementedError as error:
        raise RuntimeError(
            "jax's CUDA plugin is installed but did not start, as on a machine without a driver. Compiling needs no "
            'driver: set JAX_PLATFORMS=cpu, or `jax.config.update("jax_platforms", "cpu")` before jax is first used.'
        ) from error
    return tuple(described.devices)


def _description(chip: str) -> str:
    """Returns a chip as XLA's `GpuTargetConfigProto`, in text form."""
    info = {
        **_HOPPER,
        "memory_bandwidth": int(fact(chip, "memory_rate").value),
        "device_memory_size": int(fact(chip, "memory").value),
        "name": f'"NVIDIA {chip.upper()}"',
        "dnn_version": f'"{".".join(map(str, _cudnn()))}"',
    }
    fields = "\n".join(f"{name}: {value}" for name, value in info.items())
    major, minor, patch = _cudnn()
    return f"""
gpu_device_info {{
{fields}
cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
device_interconnect_info {{ active_links: {_NVLINKS} }}
scalar_unit_description {{ {_rates(_SCALAR_UNITS, _SCALAR_CLOCK_GHZ)} }}
matrix_unit_description {{ {_rates(_MATRIX_UNITS, _MATRIX_CLOCK_GHZ)} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {major} minor: {minor} patch: {patch} }}
device_description_str: "NVIDIA {chip.upper()}"
"""


def _rates(units: dict[int, tuple[int, int]], clock_ghz: float) -> str:
    return " ".join(
        f"rate_infos {{ key: {element} value {{ "
        f"clock_rate_ghz: {clock_ghz} units_per_core: {count} ops_per_clock: {operations} }} }}"
        for element, (count, operations) in units.items()
    )


def _cudnn() -> tuple[int, int, int]:
    """Returns the version of the installed cuDNN."""
    major, minor, patch = importlib.metadata.version("nvidia-cudnn-cu13").split(".")[:3]
    return int(major), int(minor), int(patch)
