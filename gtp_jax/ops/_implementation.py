"""Chooses the code that runs an operation: the reference, in plain jax.numpy, or the native kernel of the platform.

Every operation with a choice takes `implementation`, and `None` for the best at hand. Native is what the platform has:
this library's own kernels, cuDNN's attention, Pallas kernels. On quantized arrays both are equal bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax

from .. import native
from ..mesh import platform, runs_kernels
from . import reference
from ._lowered import traced_when_lowered

Implementation = Literal["reference", "native"]

# The platform's name in `lax.platform_dependent`, in the FFI registry, and in `gtp_jax.mesh.platform`.
_PLATFORMS = (("cpu", "cpu", "cpu"), ("cuda", "CUDA", "gpu"))


def runs_native(operation: str, implementation: Implementation | None, missing: str) -> bool:
    """Returns whether an operation runs by its native kernel.

    Args:
        operation: its name, for messages.
        implementation: what the caller asks for; `None` takes the native kernel where there is one.
        missing: why there is none for these operands on the platform at hand; empty if there is.

    Raises:
        ValueError: if `implementation` is something else.
        NotImplementedError: if it is `native`, and there is none.
    """
    if implementation not in (None, "reference", "native"):
        raise ValueError(
            f"`implementation` is {implementation!r}; it must be 'reference', 'native' or None for the best."
        )
    if implementation == "native" and missing:
        raise NotImplementedError(
            f"there is no native {operation!r} for {platform()!r} here: {missing}. "
            "Leave `implementation` out to use the reference there."
        )
    return implementation != "reference" and not missing


def call(operation: str, implementation: Implementation | None, *operands: Any, **attributes: Any) -> Any:
    """Runs an operation by the name that it has in `reference` and in `native`.

    Args:
        operation: `multi_amax`, `hadamard_amax`, `quantize`, `dequantize`, `pack` or `unpack`.
        implementation: `None` takes the native kernel on each platform that has one, else the reference: one trace
            serves them all, and the choice falls when the program is compiled.
        operands: arrays.
        attributes: what the program is specialised to.

    Raises:
        ValueError: if `implementation` is something else.
        NotImplementedError: if it is `native`, and the platform at hand has no kernel.
        TypeError: if it is differentiated: a rounding's gradient is zero, which nobody wants silently.
    """
    # with `None` the choice falls when the program is compiled, for each platform
    runs_native(operation, implementation, _missing(operation) if implementation == "native" else "")
    return _run(operands, operation=operation, implementation=implementation, attributes=tuple(attributes.items()))


def _missing(operation: str) -> str:
    """Says why the platform at hand has no kernel of this library for an operation; nothing if it has."""
    registry = next((name for _, name, here in _PLATFORMS if here == platform()), None)
    if not runs_kernels():
        return "kernels run from compute capability 8.0 (A100) on"
    return "" if registry is not None and native.has(f"gtp_{operation}", registry) else native.describe()


@functools.partial(jax.jit, static_argnames=("operation", "implementation", "attributes"))
def _run(
    operands: tuple[Any, ...],
    *,
    operation: str,
    implementation: Implementation | None,
    attributes: tuple[tuple[str, Any], ...],
) -> Any:
    def by(module: Any) -> Any:
        return functools.partial(getattr(module, operation), **dict(attributes))

    operands = _without_gradient(operation, operands)
    if implementation == "reference":
        return by(reference)(*operands)
    if implementation == "native":
        _check_replication_is_unchecked(operation, operands)
        return by(native)(*operands)
    able = [name for name, registry, _ in _PLATFORMS if native.has(f"gtp_{operation}", registry)]
    kernels = {name: by(native) for name in able if name == "cpu" or runs_kernels()}
    if not kernels:
        return by(reference)(*operands)
    _check_replication_is_unchecked(operation, operands)
    return jax.lax.platform_dependent(*operands, **kernels, default=traced_when_lowered(by(reference), by(native)))


def _check_replication_is_unchecked(operation: str, operands: Any) -> None:
    """Refuses operands that JAX knows to vary over mesh axes: it takes a kernel's results for equal on all ranks."""
    varying = {axis for x in jax.tree.leaves(operands) for axis in jax.typeof(x).mat.varying}
    if varying:
        axes = ", ".join(repr(axis) for axis in sorted(map(str, varying)))
        raise ValueError(
            f"`gtp_jax.{operation}` is called in a `jax.shard_map` that checks replication, with operands that vary "
            f"over {axes}; JAX takes the results of kernels for equal on all ranks. Pass `check_vma=False` to "
            "`jax.shard_map`, or `implementation='reference'` to the operation."
        )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _without_gradient(operation: str, operands: Any) -> Any:
    return operands


@_without_gradient.defjvp
def _refuse(operation: str, primals: Any, tangents: Any) -> Any:
    raise TypeError(
        f"`gtp_jax.{operation}` is not differentiable: a rounding's gradient is zero, and kernels have none. Give it "
        "`jax.lax.stop_gradient(...)` of its operands, or define a gradient, such as straight through, by "
        "`jax.custom_vjp`."
    )
