"""The compiled module: found or not, fit for this jaxlib or not, registered once, when first used."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pathlib
import re
from typing import Any

import jax

from ..formats import FORMATS

_MODULE = f"{__package__}._native"
REBUILD = "pip install --force-reinstall --no-deps gtp_jax, or `pip install -e .` in a checkout"


@functools.cache
def _library() -> Any:
    """Returns the module, its handlers registered, or `None` where the package was installed without a compiler.

    Raises:
        ImportError: if the module is there but broken, or newer than jaxlib; JAX would die of it later.
    """
    try:
        library = importlib.import_module(_MODULE)
    except ModuleNotFoundError as missing:  # never built; any other failure is loud
        if missing.name != _MODULE:
            raise
        return None
    _check_version(library.ffi_version)
    if (built := [str(facts["name"]) for facts in library.formats()]) != list(FORMATS):
        raise ImportError(
            f"the kernels of gtp_jax were built for the formats {', '.join(built)}, and this version has "
            f"{', '.join(FORMATS)}. Build them again: {REBUILD}."
        )
    for platform, handlers in library.handlers().items():
        for target, handler in handlers.items():
            jax.ffi.register_ffi_target(target, handler, platform=platform)
    return library


def _check_version(built: tuple[int, int]) -> None:
    """jaxlib refuses handlers built for a newer interface than its own, and takes the whole backend down with them."""
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
    """Returns whether there is a compiled module."""
    return _library() is not None


@functools.cache
def has(target: str, platform: str) -> bool:
    """Returns whether there is a handler.

    Args:
        target: its name, such as `"gtp_quantize"`.
        platform: `"cpu"` or `"CUDA"`, XLA's names.

    Raises:
        ImportError: if the module is there but broken, or newer than jaxlib.
    """
    library = _library()
    return library is not None and target in library.handlers()[platform]


def has_machine_code(capability: str) -> bool:
    """Returns whether kernels were compiled for a GPU. If not, its driver translates their PTX.

    Args:
        capability: its compute capability, such as `"9.0"`.
    """
    library, number = _library(), capability.replace(".", "")
    built = library.cuda_architectures.split() if library is not None else []
    return any(re.fullmatch(rf"{number}[af]?(-real)?", name) for name in built)


def describe() -> str:
    """Returns what was built, or why not, in a few words."""
    library = _library()
    if library is None:
        return "not built: no working C++ compiler when gtp_jax was installed"
    if not library.cuda_version:
        return "for CPU only: no nvcc when gtp_jax was installed"
    return f"for CPU and CUDA {library.cuda_version} ({library.cuda_architectures})"
