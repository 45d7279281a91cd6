"""Finds the NCCL library that JAX loads, and sets the XLA option that an NCCL older than `OLDEST_NCCL` needs.

Within a host, XLA computes all-reduces of up to a few megabytes with its own kernels. Since jaxlib 0.12 these ask NCCL
for the addresses of peer buffers through `ncclGetPeerDevicePointer`, which NCCL has exported since 2.29.2. With an
older NCCL such an all-reduce fails: `ncclGetPeerDevicePointer(...) failed: unhandled system error`. If the XLA option
that `COLLECTIVE_KERNELS` names is set to an empty string, XLA leaves all-reduces to NCCL, and older versions work too.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

OLDEST_NCCL = "2.29.2"

# The compile option that lists the collectives for which XLA uses its own kernels. An empty value means none.
COLLECTIVE_KERNELS = "xla_gpu_experimental_use_collective_kernels"

# The option's older name. XLA_FLAGS still accepts it, but as a compile option it has no effect.
_OLD_NAME = "xla_gpu_unsupported_use_all_reduce_one_shot_kernel"

_FIRST_JAXLIB = (0, 12)
_FUNCTION = "ncclGetPeerDevicePointer"


class Nccl(NamedTuple):
    """The NCCL of this environment.

    Attributes:
        version: the version, such as `2.29.2`.
        has_peer_pointers: whether it exports `ncclGetPeerDevicePointer`, which XLA's all-reduce kernels call.
    """

    version: str
    has_peer_pointers: bool


@functools.cache
def find_nccl() -> Nccl | None:
    """Loads the NCCL library that JAX's CUDA plugin loads: the one in a package such as `nvidia-nccl-cu13` if one is
    installed, otherwise the system's. Needs no GPU.

    Returns:
        The version of NCCL and what it exports; `None` if neither library can be loaded.
    """
    for path in (*_packaged(), "libnccl.so.2"):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        number = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(number))
        major, rest = divmod(number.value, 10_000)
        minor, patch = divmod(rest, 100)
        return Nccl(f"{major}.{minor}.{patch}", hasattr(library, _FUNCTION))
    return None


def _packaged() -> list[Path]:
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    return [Path(folder, "lib", "libnccl.so.2") for folder in (spec and spec.submodule_search_locations) or ()]


def nccl_is_too_old() -> bool:
    """Returns whether XLA's own all-reduce kernels fail with the jaxlib and the NCCL of this environment."""
    nccl = find_nccl()
    return nccl is not None and not nccl.has_peer_pointers and _jaxlib() >= _FIRST_JAXLIB


def _jaxlib() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", importlib.metadata.version("jaxlib"))[:2]))


def all_reduce_with_nccl() -> bool:
    """Sets XLA_FLAGS so that NCCL computes all-reduces, if XLA's own kernels would fail. Changes nothing if XLA_FLAGS
    sets that option already, to any value.

    This also covers programs that gtp_jax does not compile, such as the all-reduce in `sync_global_devices`. Call it
    before JAX starts its backend, which reads XLA_FLAGS once.

    Returns:
        Whether XLA_FLAGS changed.
    """
    if decides_collective_kernels(flags_in_environment()) or not nccl_is_too_old():
        return False
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{COLLECTIVE_KERNELS}=".strip()
    return True


def decides_collective_kernels(flags: dict[str, str]) -> bool:
    """Returns whether flags set the option for XLA's collective kernels, to any value, by its current or older name."""
    return COLLECTIVE_KERNELS in flags or _OLD_NAME in flags


def flags_in_environment() -> dict[str, str]:
    """Returns the options that XLA_FLAGS sets, by name, with their values; `true` for an option without a value."""
    words = os.environ.get("XLA_FLAGS", "").split()
    pairs = (word.removeprefix("--").partition("=") for word in words if word.startswith("--"))
    return {name: value if equals else "true" for name, equals, value in pairs}
