"""Returns the versions of the software that determines what a run computes."""

from __future__ import annotations

import contextlib
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    "gtp_jax",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cublas",
    "flax",
    "optax",
    "numpy",
    "ml_dtypes",
    "orbax-checkpoint",
    "tokenizers",
)

_DRIVER = Path("/sys/module/nvidia/version")


def installed() -> dict[str, str]:
    """Returns the versions of the installed packages and of the NVIDIA driver, if there is one, by name."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    with contextlib.suppress(OSError):
        found["NVIDIA driver"] = _DRIVER.read_text().strip()
    return found
