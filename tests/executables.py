"""One executable for equal programs of a process, which tests compile again and again."""

import functools
import hashlib
import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
from jax._src import compiler  # noqa: TID251

KEPT = 500  # programs; most are small, and a training step takes some megabytes


def share_executables() -> None:
    """Makes JAX take the executable of an equal program that this process has compiled lately.

    Programs are equal if their StableHLO is, byte for byte and with the names of operations, and so are the options and
    devices. Nothing is serialized, as it is by the persistent cache, with which steps on CPUs were wrong. Events of
    compilation are recorded as before, and a program that calls back into Python is always compiled.
    """
    # files and lines would make programs differ that two tests make alike
    jax.config.update("jax_traceback_in_locations_limit", 0)
    compiler.backend_compile_and_load = _sharing(compiler.backend_compile_and_load)


def _sharing(compile_and_load: Callable[..., Any]) -> Callable[..., Any]:
    kept: OrderedDict[Any, Any] = OrderedDict()

    @functools.wraps(compile_and_load)
    def shared(backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
        if host_callbacks:
            return compile_and_load(backend, module, devices, options, host_callbacks)
        text = io.BytesIO()
        module.operation.write_bytecode(text)
        key = (backend, hashlib.sha256(text.getbuffer()).digest(), options.SerializeAsString(), tuple(devices))
        if key not in kept:
            kept[key] = compile_and_load(backend, module, devices, options, host_callbacks)
        kept.move_to_end(key)
        if len(kept) > KEPT:
            kept.popitem(last=False)
        return kept[key]

    return shared
