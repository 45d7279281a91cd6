"""Reports what is installed, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Iterator

import jax

from ... import __version__, hlo, native
from ...hlo import columns
from ...mesh import choose_devices, has_gpu, supports_grouped_matmul
from ...ops import lacks_blocked_product
from ...train import (
    GPU_OPTIONS,
    GPU_OPTIONS_WITH_COPIES,
    GPU_OPTIONS_WITH_FP8,
    GPU_OPTIONS_WITH_OLD_NCCL,
    GPU_OPTIONS_WITH_TP,
    accepts,
    find_nccl,
    flags_in_environment,
    nccl_is_too_old,
)
from ..trainer import VIRTUAL_DEVICES
from ._doctor_collectives import check_collectives, check_processes
from ._doctor_host_link import check_host_link
from ._doctor_versions import CUDA, gradients, misfits, nccl, numbers
from ._finding import Finding, first_line

# The required distributions, and the oldest version of each.
NEEDED = {
    "jax": "0.11.2",
    "jaxlib": "0.11.2",
    "flax": "0.12.10",
    "optax": "0.2.8",
    "jaxtyping": "0.3.11",
    "orbax-checkpoint": "0.12.4",
    "pyyaml": "6.0.2",
    "filelock": "3.16.1",
    "tqdm": "4.66",
    "matplotlib": "3.9",
}
PYTHON = "3.12"


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    del args
    choose_devices(VIRTUAL_DEVICES)
    findings = [*_versions(), *_devices(), _kernels(), *_blocks(), _accepted_options(), *_extras()]
    marks = {"ok": "ok", "optional": "-", "broken": "BROKEN"}
    print(columns(("", "what", "found"), [(marks[f.status], f.name, f.found) for f in findings]))
    print("\nXLA options with which a training step is compiled on GPUs")
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
    yield _needed("python", platform.python_version(), PYTHON, "install a newer Python, such as 3.12")
    for name, oldest in NEEDED.items():
        yield _needed(name, _installed(name), oldest, f'pip install --upgrade "{name}>={oldest}"')
    installed = {name: version for name in ("jax", "jaxlib", *CUDA) if (version := _installed(name))}
    yield from misfits(installed, gpu=has_gpu())
    yield from gradients(installed, gpu=has_gpu())


def _needed(name: str, installed: str | None, oldest: str, remedy: str) -> Finding:
    if installed is None:
        return Finding(name, "broken", "not installed", remedy)
    if numbers(installed) < numbers(oldest):
        return Finding(name, "broken", f"{installed}, older than {oldest}", remedy)
    return Finding(name, "ok", installed)


def _devices() -> Iterator[Finding]:
    plugin = next(((n, v) for n in CUDA if n.endswith("plugin") and (v := _installed(n))), None)
    try:
        devices = jax.devices()
    except RuntimeError as error:
        yield Finding("devices", "broken", first_line(error), "check whether JAX_PLATFORMS names an absent platform")
        return
    kind = devices[0].device_kind if devices[0].platform != "cpu" else "virtual CPU devices"
    yield Finding("devices", "ok", f"{len(devices)} x {kind}")
    yield check_collectives()
    gpu = devices[0].platform == "gpu"
    if gpu and len(devices) > 1:
        yield check_processes(len(devices))
    yield _gpu(gpu, plugin)
    yield check_host_link(devices[0])
    if gpu:
        yield nccl(find_nccl(), too_old=nccl_is_too_old())


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
    return Finding(name, "optional", f"a GPU that jax cannot use ({installed})", "check whether `nvidia-smi` works")


def _kernels() -> Finding:
    name = "kernels"
    here = "CUDA" if jax.default_backend() == "gpu" else "cpu"
    try:
        description, built = native.describe(), native.has("gtp_quantize", here)
    except ImportError as error:
        found, _, remedy = first_line(error).partition(". ")
        return Finding(name, "broken", found, remedy.removesuffix(".") or f"build them again: {native.REBUILD}")
    if built:
        capability = getattr(jax.devices()[0], "compute_capability", None)
        if capability is None or native.code_for(capability) == "machine code":
            return Finding(name, "ok", description)
        translated = f"{description}, translated from PTX by the driver"
        return Finding(name, "optional", translated, native.rebuild_for(capability))
    needed = "nvcc (the CUDA toolkit) on the PATH" if native.is_built() else "a C++20 compiler, and nvcc for GPUs,"
    remedy = f"install {needed} and build them: {native.REBUILD}; without them, XLA compiles quantization"
    return Finding(name, "optional", description, remedy)


def _blocks() -> Iterator[Finding]:
    """Reports what multiplies FP8 in blocks of 128, on GPUs whose tensor cores can."""
    if not supports_grouped_matmul() or not native.is_built():
        return
    if lacks := lacks_blocked_product():
        yield Finding("FP8 in blocks", "optional", f"slow: {lacks}", 'pip install --upgrade "gtp_jax[cuda]"')
    else:
        yield Finding("FP8 in blocks", "ok", "cuBLASLt {}.{}".format(*native.cublaslt_version()))


def _extras() -> Iterator[Finding]:
    uses = {
        "tokenizers": ("tokenizers", "--tokenizer; without it, every byte is a token"),
        "jinja2": ("chat", "--chat"),
    }
    for package, (extra, use) in uses.items():
        if version := _installed(package):
            yield Finding(package, "ok", version)
        else:
            yield Finding(package, "optional", "not installed", f'pip install "gtp_jax[{extra}]", for {use}')
    missing = hlo.missing_packages()
    if missing:
        remedy = 'pip install "gtp_jax[target]", for `gtp-jax inspect --target`; about 700 MB'
        yield Finding("compiling for GPUs", "optional", f"{', '.join(missing)} not installed", remedy)
    else:
        yield Finding("compiling for GPUs", "ok", "everything `gtp-jax inspect --target` needs")


# Options that were measured, and that the library leaves at XLA's defaults.
_LEFT_ALONE = {
    "xla_gpu_enable_command_buffer": "CUDA graphs as XLA chooses them: without them, a bf16 step takes 1 to 2 % "
    "longer; with every kernel in them, no less"
}


def _options() -> Iterator[tuple[str, str, str, str]]:
    """Lists the library's options for GPUs; those that XLA_FLAGS sets keep their values."""
    theirs = flags_in_environment()
    listed = [
        (name, option, "tp 1" if name in GPU_OPTIONS_WITH_TP else "always") for name, option in GPU_OPTIONS.items()
    ]
    listed += [(name, option, "tp > 1") for name, option in GPU_OPTIONS_WITH_TP.items()]
    listed += [(name, option, "FP8 matmuls") for name, option in GPU_OPTIONS_WITH_FP8.items()]
    listed += [(name, option, "offload") for name, option in GPU_OPTIONS_WITH_COPIES.items()]
    if nccl_is_too_old():
        listed += [(name, option, "always") for name, option in GPU_OPTIONS_WITH_OLD_NCCL.items()]
    for name, (value, reason), where in listed:
        shown = str(value).rpartition("/")[2] or "none"  # of a path, the file
        if theirs.get(name, str(value)).lower() != str(value).lower():
            yield name, theirs[name], where, f"set by your XLA_FLAGS; the library would use {shown}"
        else:
            yield name, shown, where, reason
    for name, reason in _LEFT_ALONE.items():
        yield name, theirs.get(name, "XLA's"), "always", reason


def _accepted_options() -> Finding:
    name = "XLA options"
    options = [*GPU_OPTIONS.items(), *GPU_OPTIONS_WITH_TP.items(), *GPU_OPTIONS_WITH_FP8.items()]
    options += GPU_OPTIONS_WITH_COPIES.items()
    options += GPU_OPTIONS_WITH_OLD_NCCL.items() if nccl_is_too_old() else ()
    unknown = sorted({known for known, option in options if not accepts(known, option.value)})
    if not unknown:
        return Finding(name, "ok", "this version knows all that the library sets")
    return Finding(name, "broken", f"this version lacks {', '.join(unknown)}", 'pip install "jax>=0.11.2,<0.13"')


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
