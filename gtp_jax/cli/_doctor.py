"""`gtp-jax doctor`: what is installed, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import __version__, native, plan
from ..mesh import AXES, choose_devices, has_gpu, make_mesh
from ..plan import columns
from ..train import GPU_OPTIONS, GPU_OPTIONS_WITH_FP8, GPU_OPTIONS_WITH_TP, accepts, flags_in_environment
from ..trainer import VIRTUAL_DEVICES

Status = Literal["ok", "optional", "broken"]

# Distributions that nothing works without, and the oldest version of each.
NEEDED = {
    "jax": "0.11.2",
    "jaxlib": "0.11.2",
    "flax": "0.12.10",
    "optax": "0.2.8",
    "orbax-checkpoint": "0.12.4",
    "tqdm": "4.66",
    "matplotlib": "3.9",
}
PYTHON = "3.12"

_CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: what.
        status: `ok`; `optional` if something can be added; `broken` if training cannot work.
        found: what there is.
        remedy: what to do, if anything.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="say what is installed, what is missing, and what to do",
        description="Looks at versions, devices and extras. Exit status 1 if training cannot work here, else 0.",
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    del args
    choose_devices(VIRTUAL_DEVICES)
    findings = [*_versions(), *_devices(), _kernels(), _accepted_options(), *_extras()]
    marks = {"ok": "ok", "optional": "-", "broken": "BROKEN"}
    print(columns(("", "what", "found"), [(marks[f.status], f.name, f.found) for f in findings]))
    print("\nXLA options that a training step is compiled with on GPUs")
    print(columns(("option", "value", "where", "why"), _options()))
    remedies = [f for f in findings if f.remedy]
    if remedies:
        print("\nwhat to do")
        print("\n".join(f"  {f.name}: {f.remedy}" for f in remedies))
    broken = sum(f.status == "broken" for f in findings)
    print(f"\n{broken} broken: training cannot work here." if broken else "\nTraining works here: gtp-jax train")
    return 1 if broken else 0


def _versions() -> Iterator[Finding]:
    yield Finding("gtp_jax", "ok", __version__)
    yield _needed("python", platform.python_version(), PYTHON, "install a newer Python, 3.12 for instance")
    for name, oldest in NEEDED.items():
        yield _needed(name, _installed(name), oldest, f'pip install --upgrade "{name}>={oldest}"')


def _needed(name: str, found: str | None, oldest: str, remedy: str) -> Finding:
    if found is None:
        return Finding(name, "broken", "not installed", remedy)
    if _numbers(found) < _numbers(oldest):
        return Finding(name, "broken", f"{found}, older than {oldest}", remedy)
    return Finding(name, "ok", found)


def _devices() -> Iterator[Finding]:
    plugin = next(((n, v) for n in _CUDA_PLUGINS if (v := _installed(n))), None)
    try:
        devices = jax.devices()
    except RuntimeError as error:
        yield Finding("devices", "broken", _first_line(error), "see whether JAX_PLATFORMS asks for what is not there")
        return
    kind = devices[0].device_kind if devices[0].platform != "cpu" else "virtual CPU devices"
    yield _computes(f"{len(devices)} x {kind}")
    yield _gpu(devices[0].platform == "gpu", plugin)


def _computes(what: str) -> Finding:
    """A sum over all devices, each with its own share: compiler and collectives work."""
    count = jax.device_count()
    mesh = make_mesh(gtp=count)
    total = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, AXES), mesh=mesh, in_specs=PartitionSpec(AXES), out_specs=PartitionSpec()
        )
    )
    try:
        found = float(total(jnp.arange(count, dtype=jnp.float32))[0])
    except jax.errors.JaxRuntimeError as error:
        return Finding(
            "devices", "broken", f"{what}: {_first_line(error)}", "see the message; reinstall jax and jaxlib"
        )
    if found != count * (count - 1) / 2:
        return Finding("devices", "broken", f"{what}, which add up wrongly", "report it, with this output")
    return Finding("devices", "ok", f"{what}; a sum over all of them is right")


def _gpu(used: bool, plugin: tuple[str, str] | None) -> Finding:
    name = "CUDA"
    installed = " ".join(plugin) if plugin else "no plugin"
    if used:
        return Finding(name, "ok", installed)
    if not has_gpu():
        return Finding(name, "ok", f"no GPU on this machine ({installed}); virtual CPU devices are used")
    if plugin is None:
        return Finding(name, "optional", "a GPU, but no plugin", 'pip install "gtp_jax[cuda]"')
    asked = os.environ.get("JAX_PLATFORMS")
    if asked and not {"cuda", "gpu"} & set(asked.split(",")):
        return Finding(name, "optional", f"a GPU, but JAX_PLATFORMS={asked}", "unset JAX_PLATFORMS")
    jaxlib = _installed("jaxlib")
    if jaxlib and _numbers(plugin[1])[:3] != _numbers(jaxlib)[:3]:
        return Finding(name, "optional", f"{installed}, but jaxlib {jaxlib}", f'pip install "{plugin[0]}=={jaxlib}"')
    return Finding(name, "optional", f"a GPU that jax cannot use ({installed})", "see whether `nvidia-smi` works")


def _kernels() -> Finding:
    name = "kernels"
    try:
        found = native.describe()
    except ImportError as error:
        return Finding(name, "broken", _first_line(error), f"build them again: {native.REBUILD}")
    here = "CUDA" if jax.default_backend() == "gpu" else "cpu"
    if native.has("gtp_quantize", here):
        return Finding(name, "ok", found)
    needed = "nvcc (the CUDA toolkit) on the PATH" if native.is_built() else "a C++20 compiler, and nvcc for GPUs,"
    remedy = f"install {needed} and build them: {native.REBUILD}; without, quantization runs as XLA compiles it"
    return Finding(name, "optional", found, remedy)


def _extras() -> Iterator[Finding]:
    tokenizers = _installed("tokenizers")
    if tokenizers:
        yield Finding("tokenizers", "ok", tokenizers)
    else:
        remedy = 'pip install "gtp_jax[tokenizers]", for --tokenizer; without, every byte is a token'
        yield Finding("tokenizers", "optional", "not installed", remedy)
    missing = plan.missing_packages()
    if missing:
        remedy = 'pip install "gtp_jax[target]", for `gtp-jax inspect --target`; some 700 MB'
        yield Finding("compiling for GPUs", "optional", f"{', '.join(missing)} not installed", remedy)
    else:
        yield Finding("compiling for GPUs", "ok", "everything `gtp-jax inspect --target` needs")


def _options() -> Iterator[tuple[str, str, str, str]]:
    """The library's options for GPUs, but those that XLA_FLAGS sets, which stay as they are."""
    theirs = flags_in_environment()
    listed = [
        (name, option, "tp 1" if name in GPU_OPTIONS_WITH_TP else "always") for name, option in GPU_OPTIONS.items()
    ]
    listed += [(name, option, "tp > 1") for name, option in GPU_OPTIONS_WITH_TP.items()]
    listed += [(name, option, "FP8 matmuls") for name, option in GPU_OPTIONS_WITH_FP8.items()]
    for name, (value, reason), where in listed:
        if name in theirs:
            yield name, theirs[name], where, f"your XLA_FLAGS say so; the library would take {value}"
        else:
            yield name, str(value), where, reason


def _accepted_options() -> Finding:
    name = "XLA options"
    options = [*GPU_OPTIONS.items(), *GPU_OPTIONS_WITH_TP.items(), *GPU_OPTIONS_WITH_FP8.items()]
    unknown = sorted({known for known, option in options if not accepts(known, option.value)})
    if not unknown:
        return Finding(name, "ok", "this version knows all of the library's")
    return Finding(name, "broken", f"this version knows no {', '.join(unknown)}", 'pip install "jax>=0.11.2,<0.13"')


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
