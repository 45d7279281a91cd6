"""Finds installed versions that do not fit together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ...train import COLLECTIVE_KERNELS, OLDEST_NCCL, Nccl
from ._finding import Finding

CUDA = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt")


def misfits(installed: Mapping[str, str], *, gpu: bool) -> Iterator[Finding]:
    """Compares JAX's own packages, which are released together.

    Args:
        installed: versions by the name of the distribution.
        gpu: whether this machine has a GPU, which needs the plugin.

    Yields:
        A finding for each package whose version differs from jaxlib's.
    """
    jax, jaxlib = installed.get("jax"), installed.get("jaxlib")
    if jax is None or jaxlib is None:
        return
    if numbers(jax) != numbers(jaxlib):
        misfit = f"{jax} with jaxlib {jaxlib}: JAX accepts it, but tests each release with its own jaxlib"
        yield Finding("jax and jaxlib", "optional", misfit, f'pip install "jaxlib=={jax}"')
    for name in CUDA:
        version = installed.get(name)
        if version is not None and numbers(version) != numbers(jaxlib):
            misfit = f"{version} does not fit jaxlib {jaxlib}, which does not use it"
            yield Finding(name, "broken" if gpu else "optional", misfit, f'pip install "{name}=={jaxlib}"')


def gradients(installed: Mapping[str, str], *, gpu: bool) -> Iterator[Finding]:
    """Yields a finding if the installed XLA computed wrong gradients on GPUs (docs/install.md, "Limits")."""
    if gpu and numbers(installed.get("jaxlib", "")) >= (0, 12):
        wrong = "on H200s, 0.12.0.1 computed wrong gradients of a stock model in float32 (docs/install.md, Limits)"
        yield Finding("gradients", "optional", wrong, 'pip install "jax[cuda13]==0.11.2"')


def nccl(loaded: Nccl | None, *, too_old: bool) -> Finding:
    """Returns a finding that says whether the NCCL that JAX loads fits jaxlib.

    Args:
        loaded: the NCCL that JAX loads.
        too_old: whether XLA's own all-reduce kernels fail with it.
    """
    newer = f'pip install "nvidia-nccl-cu13>={OLDEST_NCCL}"'
    if loaded is None:
        return Finding("NCCL", "broken", "not installed", newer)
    if not too_old:
        return Finding("NCCL", "ok", loaded.version)
    return Finding(
        "NCCL",
        "optional",
        f"{loaded.version}, older than {OLDEST_NCCL}: with this jaxlib a plain `lax.psum` fails",
        f"{newer}; until then, `gtp-jax` and `train_step` let NCCL compute all-reduces, and your own programs need "
        f"XLA_FLAGS=--{COLLECTIVE_KERNELS}= before JAX starts (docs/install.md)",
    )


def numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version: 0, 12, 0, 1 for `0.12.0.1`; 0, 12, 0 for `0.12.0.dev3`."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
