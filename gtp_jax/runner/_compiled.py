"""Keeps compiled programs for later runs, in JAX's persistent compilation cache."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import jax

from ..mesh import on_gpu

_MOST_BYTES = 4 << 30
_OFF = "JAX_ENABLE_COMPILATION_CACHE=false"


def keep_compiled() -> str:
    """Turns JAX's persistent compilation cache on, for a command of one process on GPUs, unless the user has chosen.

    A folder or a limit that JAX's configuration names stays as it is. Nothing is kept on CPUs, where programs from the
    cache computed other results than freshly compiled ones (docs/troubleshooting.md). Do not call it with several
    processes: XLA divides the tuning of kernels among them, so all must compile a program, or none, and their folders
    may differ.

    Starts JAX's backend. Must be called before anything is compiled.

    Returns:
        Where programs are kept, or why they are not, for the user; empty on CPUs, and if the user has chosen.
    """
    settings: Any = jax.config
    if not on_gpu() or settings.jax_compilation_cache_dir or not settings.jax_enable_compilation_cache:
        return ""
    try:
        folder = _folder()
    except (OSError, RuntimeError) as error:  # a RuntimeError if there is no home
        return f"compiled programs are not kept: {error}; JAX_COMPILATION_CACHE_DIR names another folder"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if settings.jax_compilation_cache_max_size == -1:
        jax.config.update("jax_compilation_cache_max_size", _MOST_BYTES)
    return f"compiled programs are kept in {folder} for later runs; {_OFF} switches this off"


def _folder() -> Path:
    """Returns the user's folder of compiled programs, which exists and can be written.

    Raises:
        OSError: if it cannot be written, or others can write to it: what it holds is run.
        RuntimeError: if there is no home.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named if os.path.isabs(named) else "~/.cache").expanduser()  # its specification ignores a relative one
    if not base.is_absolute():
        raise RuntimeError(f"HOME is {os.environ.get('HOME')!r}, which is not an absolute path")
    folder = base / "gtp_jax" / "compiled"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        whose = "belongs to another user" if found.st_uid != os.geteuid() else "can be written by other users"
        raise PermissionError(f"{folder} {whose}, who could put programs there that this one would run")
    with tempfile.TemporaryFile(dir=folder):
        pass
    return folder
