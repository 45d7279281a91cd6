"""Loads the compiled library on first use, checks that it fits this jaxlib, and registers its handlers once."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any, Literal

import jax

from ..formats import FORMATS

# How a GPU can run the kernels: as code that was compiled for it, as PTX that its driver translates, or not at all.
Code = Literal["machine code", "PTX", "none"]

_FILE = "libgtp_native.so"
_WORDS = ctypes.POINTER(ctypes.c_uint64)
REBUILD = "`pip install --force-reinstall --no-deps -e .` in a checkout of gtp_jax"


@dataclasses.dataclass
class _Facts:
    """How the library was built: what `gtp_facts` in `ffi/handlers/exports.cc` returns."""

    ffi_version: list[int]
    cuda_version: str
    cuda_architectures: str
    targets: dict[str, str]
    formats: list[dict[str, Any]]
    record: tuple[int, int, int] = (0, 0, 0)  # older libraries have none


@functools.cache
def _opened() -> ctypes.CDLL | None:
    """Returns the library, or `None` if the package was installed without it.

    Raises:
        ImportError: if it cannot be loaded.
    """
    # an editable installation has the sources in one folder, and the library in another
    folders = sys.modules["gtp_jax.native"].__path__
    found = [path for folder in folders if (path := pathlib.Path(folder, _FILE)).is_file()]
    if not found:
        return None
    try:
        library = ctypes.CDLL(str(found[0]))
    except OSError as error:
        raise ImportError(f"the kernels of gtp_jax cannot be loaded: {error}. Build them again: {REBUILD}.") from error
    library.gtp_facts.restype = ctypes.c_char_p
    library.gtp_cublaslt_version.restype = ctypes.c_size_t
    if hasattr(library, "gtp_record_to"):
        library.gtp_record_to.argtypes, library.gtp_record_to.restype = (_WORDS, ctypes.c_int32), ctypes.c_char_p
    return library


@functools.cache
def _facts() -> _Facts | None:
    """Registers the library's handlers, and returns how it was built; `None` without a library.

    Raises:
        ImportError: if the library cannot be loaded, was built for a foreign function interface that jaxlib does not
            support (see `_check_version`), or was built for other formats.
    """
    library = _opened()
    if library is None:
        return None
    facts = _Facts(**json.loads(library.gtp_facts()))
    _check_version(facts.ffi_version)
    if (built := [str(described["name"]) for described in facts.formats]) != list(FORMATS):
        raise ImportError(
            f"the kernels of gtp_jax were built for the formats {', '.join(built)}, but this version has "
            f"{', '.join(FORMATS)}. Build them again: {REBUILD}."
        )
    for platform, targets in facts.targets.items():
        for target in targets.split():
            handler = jax.ffi.pycapsule(library[f"{target}_{platform.lower()}"])
            jax.ffi.register_ffi_target(target, handler, platform=platform)
    return facts


def _check_version(built: Sequence[int]) -> None:
    """Raises an error if the handlers were built for another major version, or a newer minor version, of the interface
    than jaxlib's. jaxlib would reject them, and the whole backend would fail to start."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (
        int(match.group(1)) if (match := re.search(rf"define XLA_FFI_API_{part} (\d+)", header)) else -1
        for part in ("MAJOR", "MINOR")
    )
    if built[0] != major or built[1] > minor:
        raise ImportError(
            f"the kernels of gtp_jax were built for version {built[0]}.{built[1]} of XLA's foreign function interface, "
            f"but jaxlib {importlib.metadata.version('jaxlib')} has {major}.{minor}. Build them again: {REBUILD}."
        )


def is_built() -> bool:
    """Returns whether the compiled library is available."""
    return _facts() is not None


def has(target: str, platform: str) -> bool:
    """Returns whether the compiled library has a handler.

    Args:
        target: the name of the handler, such as `"gtp_quantize"`.
        platform: XLA's name of the platform, `"cpu"` or `"CUDA"`.

    Raises:
        ImportError: if the library exists but cannot be used, as in `_facts`; or if the handler is for CUDA, JAX uses
            the GPUs of this machine, and the library contains no code that these GPUs can run.
    """
    if not _has(target, platform):
        return False
    if platform == "CUDA" and jax.default_backend() == "gpu":
        _check_code(jax.devices()[0].compute_capability)
    return True


@functools.cache
def _has(target: str, platform: str) -> bool:
    facts = _facts()
    return facts is not None and target in facts.targets[platform].split()


def _check_code(capability: str) -> None:
    if code_for(capability) == "none":
        raise ImportError(
            f"the kernels of gtp_jax were built {describe()}, none of which this GPU of compute capability "
            f"{capability} can run. {rebuild_for(capability)}."
        )


def rebuild_for(capability: str) -> str:
    """Returns how to build the kernels for a GPU, given its compute capability, such as `"9.0"`."""
    number = capability.replace(".", "")
    code = f"{number}a-real" if int(number) >= 90 else f"{number}-real"
    return f"Build them on a machine with such a GPU, or elsewhere with CUDAARCHS={code} in the environment: {REBUILD}"


def code_for(capability: str) -> Code:
    """Returns the form in which a GPU can run the kernels.

    Machine code runs on GPUs with the same major capability and the same or a later minor one. PTX, which a driver
    translates, runs on GPUs of the capability it was built for and of all later ones. With the suffix `a`, both run
    only on GPUs of exactly their own capability; with `f`, only on those with the same major capability and the same or
    a later minor one.

    Args:
        capability: the GPU's compute capability, such as `"9.0"`.
    """
    facts, found = _facts(), False
    major, minor = (int(part) for part in capability.split("."))
    for name in facts.cuda_architectures.split() if facts is not None else ():
        parts = re.fullmatch(r"(\d+)(\d)([af]?)(-real|-virtual)?", name)
        if parts is None:
            continue
        own, suffix = (int(parts[1]), int(parts[2])), parts[3]
        same = own == (major, minor)
        of_family = own[0] == major and own[1] <= minor
        if parts[4] != "-virtual" and (same if suffix == "a" else of_family):
            return "machine code"
        if parts[4] != "-real" and (same if suffix == "a" else of_family if suffix else own <= (major, minor)):
            found = True
    return "PTX" if found else "none"


def record_sizes() -> tuple[int, int, int]:
    """Returns the sizes in `ffi/include/gtp/record.h`: devices, stamps per device, and bits of a stamp's id."""
    facts = _facts()
    return (0, 0, 0) if facts is None else facts.record


def record_to(memory: Any, device: int) -> None:
    """Makes stamps write to memory that stays valid until the process ends.

    Args:
        memory: a writable buffer for all stamps of a record.
        device: the ordinal of a GPU of this process; -1 if it uses none.

    Raises:
        ImportError: if the library cannot do this, or GPUs cannot write to this memory.
    """
    library = _opened()
    assert library is not None
    if error := library.gtp_record_to(ctypes.cast((ctypes.c_uint64 * 1).from_buffer(memory), _WORDS), device):
        raise ImportError(f"GPUs cannot write to the record of stamps: {error.decode()}.")


@functools.cache
def cublaslt_version() -> tuple[int, int]:
    """Returns the version of the cuBLASLt that JAX has loaded, such as `(12, 9)`; `(0, 0)` if there is none, or the
    library was not built for CUDA. Call it after JAX has found its GPUs."""
    library = _opened()
    number = library.gtp_cublaslt_version() if library is not None else 0
    return number // 10_000, number // 100 % 100


def describe() -> str:
    """Returns a short description of what was built, or why nothing was."""
    facts = _facts()
    if facts is None:
        return "not built: this is the pure wheel, or there was no working C++ compiler when gtp_jax was installed"
    if not facts.cuda_version:
        return "for CPU only: no nvcc when gtp_jax was installed"
    return f"for CPU and CUDA {facts.cuda_version} ({facts.cuda_architectures})"
