"""Describes how an attempt at a run was started: enough to start it again, and to see how two attempts differ."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from ... import __version__
from ...train import find_nccl
from ._versions import installed

# The only environment variables that are recorded. They determine how programs are compiled and run; others may hold
# secrets.
_ENVIRONMENT = re.compile(
    r"(JAX_(PLATFORMS|ENABLE_\w+|DEFAULT_\w+|NUM_CPU_DEVICES|COMPILATION_CACHE_DIR|TRACEBACK_FILTERING)"
    r"|XLA_FLAGS|LIBTPU_INIT_ARGS|XLA_PYTHON_CLIENT_(PREALLOCATE|MEM_FRACTION|ALLOCATOR)"
    r"|NCCL_(ALGO|PROTO|DEBUG|IB_DISABLE|P2P_DISABLE|NVLS_ENABLE|CUMEM_ENABLE|SOCKET_IFNAME)"
    r"|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER)|TF_CPP_MIN_LOG_LEVEL|OMP_NUM_THREADS"
    r"|SLURM_(JOB_ID|STEP_NUM_TASKS|PROCID|RESTART_COUNT)|OMPI_COMM_WORLD_(SIZE|RANK))"
)


def attempt(program: str = "gtp-jax") -> dict[str, Any]:
    """Returns the command, versions, devices and recorded environment variables of this process.

    Args:
        program: the program, whose arguments are those of the process.
    """
    devices = jax.devices()
    return {
        "command": shlex.join([program, *sys.argv[1:]]) if sys.argv else "",
        "directory": os.getcwd(),
        "commit": commit(Path(__file__).parent),
        "versions": versions(),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if _ENVIRONMENT.fullmatch(name)},
        "processes": jax.process_count(),
        "devices": len(devices),
        "device_kind": devices[0].device_kind,
        "pid": os.getpid(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of installed software by name; on GPUs, also those of NCCL and of the CUDA platform."""
    found = {**installed(), "gtp_jax": __version__, "python": sys.version.split()[0]}
    if jax.default_backend() == "gpu":
        if (nccl := find_nccl()) is not None:
            found["nccl"] = nccl.version
        found["platform"] = devices_version()
    return found


def devices_version() -> str:
    """Returns the platform version that JAX's backend reports, such as that of CUDA, as one line."""
    return " ".join(jax.devices()[0].client.platform_version.split())


def commit(directory: Path) -> str | None:
    """Returns the commit of the source in a directory, with a `+` if files have changed; `None` without one."""
    try:
        options: Any = dict(cwd=directory, capture_output=True, text=True, timeout=10, check=True)
        head = subprocess.run(["git", "rev-parse", "HEAD"], **options).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no", "."], **options).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return head + "+" * bool(changed.strip())
