"""Loads the compiled module on first use, checks that it fits this jaxlib, and registers its handlers once."""

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
    """Returns the module with its handlers registered, or `None` if the package was installed without a compiler.

    Raises:
        ImportError: if the module exists but is broken, was built for a newer foreign function interface than
            jaxlib's, which would crash JAX later, or was built for other formats.
    """
    try:
        library = importlib.import_module(_MODULE)
    except ModuleNotFoundError as missing:  # never built; any other failure is raised
        if missing.name != _MODULE:
            raise
        return None
    _check_version(library.ffi_version)
    if (built := [str(facts["name"]) for facts in library.formats()]) != list(FORMATS):
        raise ImportError(
            f"the kernels of gtp_jax were built for the formats {', '.join(built)}, but this version has "
            f"{', '.join(FORMATS)}. Build them again: {REBUILD}."
        )
    for platform, handlers in library.handlers().items():
        for target, handler in handlers.items():
            jax.ffi.register_ffi_target(target, handler, platform=platform)
    return library


def _check_version(built: tuple[int, int]) -> None:
    """Raises an error if the handlers were built for a newer interface than jaxlib's. Otherwise jaxlib would reject
    them, and the whole backend would fail to start."""
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
    """Returns whether the compiled module is available."""
    return _library() is not None


@functools.cache
def has(target: str, platform: str) -> bool:
    """Returns whether the compiled module has a handler.

    Args:
        target: the name of the handler, such as `"gtp_quantize"`.
        platform: XLA's name of the platform, `"cpu"` or `"CUDA"`.

    Raises:
        ImportError: if the module exists but cannot be used, as in `_library`.
    """
    library = _library()
    return library is not None and target in library.handlers()[platform]


def has_machine_code(capability: str) -> bool:
    """Returns whether the kernels were compiled to machine code for a GPU. If not, its driver compiles their PTX.

    Args:
        capability: the compute capability of the GPU, such as `"9.0"`.
    """
    library, number = _library(), capability.replace(".", "")
    built = library.cuda_architectures.split() if library is not None else []
    return any(re.fullmatch(rf"{number}[af]?(-real)?", name) for name in built)


def describe() -> str:
    """Returns a short description of what was built, or why nothing was."""
    library = _library()
    if library is None:
        return "not built: no working C++ compiler when gtp_jax was installed"
    if not library.cuda_version:
        return "for CPU only: no nvcc when gtp_jax was installed"
    return f"for CPU and CUDA {library.cuda_version} ({library.cuda_architectures})"
