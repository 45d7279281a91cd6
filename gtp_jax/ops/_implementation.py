"""Chooses the code that runs an operation: the reference, in plain jax.numpy, or the native kernel of the platform.

Every operation with a choice has an argument `implementation`, where `None` selects the best available. Native kernels
depend on the platform: this library's own kernels, cuDNN's attention, or Pallas kernels. Quantization, packing and
their inverses are equal bit for bit in both implementations; products and attention may differ in rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import jax

from .. import native
from ..mesh import platform, runs_kernels
from . import reference
from ._lowered import traced_when_lowered

Implementation = Literal["reference", "native"]

# The names of a platform in `lax.platform_dependent`, in the FFI registry, and in `gtp_jax.mesh.platform`.
_PLATFORMS = (("cpu", "cpu", "cpu"), ("cuda", "CUDA", "gpu"))


class Row(Protocol):
    """A row of a table of the implementations of an operation, which are called in the same way.

    Attributes:
        native: whether it is a native kernel, rather than a reference.
        lacks: returns why it does not compute what is asked for; an empty string if it does.
    """

    @property
    def native(self) -> bool: ...
    @property
    def lacks(self) -> Callable[..., str]: ...


def choose[R: Row](operation: str, implementation: Implementation | None, table: Sequence[R], asked: Any) -> R:
    """Returns the first row of a table that computes what is asked for.

    Args:
        operation: the name of the operation, for messages.
        implementation: the implementation that the caller asks for; `None` uses a native kernel if there is one.
        table: the implementations. The last native one is the one that takes the most, so a message says what it lacks;
            the last reference lacks nothing.
        asked: what `lacks` of every row takes.

    Raises:
        ValueError, NotImplementedError: as in `runs_native`.
    """
    reasons = [row.lacks(asked) for row in table]
    of_natives = [reason for row, reason in zip(table, reasons, strict=True) if row.native]
    native = runs_native(operation, implementation, "" if "" in of_natives else of_natives[-1])
    return next(row for row, reason in zip(table, reasons, strict=True) if row.native == native and not reason)


def runs_native(operation: str, implementation: Implementation | None, missing: str) -> bool:
    """Returns whether an operation runs as a native kernel.

    Args:
        operation: the name of the operation, for messages.
        implementation: the implementation that the caller asks for; `None` uses the native kernel if there is one.
        missing: why there is no native kernel for these operands on the current platform; empty if there is one.

    Raises:
        ValueError: if `implementation` is not one of the allowed values.
        NotImplementedError: if it is `"native"`, and there is no native kernel.
    """
    if implementation not in (None, "reference", "native"):
        raise ValueError(
            f"`implementation` is {implementation!r}; it must be 'reference', 'native' or None for the best."
        )
    if implementation == "native" and missing:
        raise NotImplementedError(
            f"there is no native {operation!r} for {platform()!r} here: {missing}. "
            "Leave `implementation` out to use the reference."
        )
    return implementation != "reference" and not missing


def call(operation: str, implementation: Implementation | None, *operands: Any, **attributes: Any) -> Any:
    """Runs an operation, given the name that it has in `reference` and in `native`.

    Args:
        operation: `multi_amax`, `hadamard_amax`, `quantize`, `dequantize`, `pack`, `pack_apart` or `unpack`.
        implementation: `None` uses the native kernel on each platform that has one, and otherwise the reference. One
            trace serves all platforms; the choice is made when the program is compiled.
        operands: the arrays that the operation takes.
        attributes: the static arguments of the operation.

    Raises:
        ValueError: if `implementation` is not one of the allowed values.
        NotImplementedError: if it is `"native"`, and the current platform has no kernel.
        TypeError: if the operation is differentiated, because the gradient of rounding is zero, which should not happen
            silently.
    """
    # with `None`, the choice is made for each platform when the program is compiled
    runs_native(operation, implementation, missing_kernel(operation) if implementation == "native" else "")
    return _run(operands, operation=operation, implementation=implementation, attributes=tuple(attributes.items()))


def missing_kernel(operation: str) -> str:
    """Returns why this library has no kernel for an operation on the current platform; an empty string if it has."""
    registry = next((name for _, name, here in _PLATFORMS if here == platform()), None)
    if not runs_kernels():
        return "kernels require compute capability 8.0 (A100) or later"
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

    operands = without_gradient(operation, operands)
    if implementation == "reference":
        return by(reference)(*operands)
    if implementation == "native":
        check_replication_is_unchecked(operation, operands)
        return by(native)(*operands)
    able = [name for name, registry, _ in _PLATFORMS if native.has(f"gtp_{operation}", registry)]
    kernels = {name: by(native) for name in able if name == "cpu" or runs_kernels()}
    if not kernels:
        return by(reference)(*operands)
    check_replication_is_unchecked(operation, operands)
    return jax.lax.platform_dependent(*operands, **kernels, default=traced_when_lowered(by(reference), by(native)))


def check_replication_is_unchecked(operation: str, operands: Any) -> None:
    """Raises an error if JAX tracks that operands vary over mesh axes, because it assumes that the results of a kernel
    are equal on all ranks."""
    varying = {axis for x in jax.tree.leaves(operands) for axis in jax.typeof(x).mat.varying}
    if varying:
        axes = ", ".join(repr(axis) for axis in sorted(map(str, varying)))
        raise ValueError(
            f"`gtp_jax.ops.{operation}` is called in a `jax.shard_map` that checks replication, with operands that "
            f"vary over {axes}, but JAX assumes that the results of kernels are equal on all ranks. Pass "
            "`check_vma=False` to `jax.shard_map`, or `implementation='reference'` to the operation."
        )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def without_gradient(operation: str, operands: Any) -> Any:
    """Returns its operands; raises a TypeError when differentiated."""
    return operands


@without_gradient.defjvp
def _refuse(operation: str, primals: Any, tangents: Any) -> Any:
    raise TypeError(
        f"`gtp_jax.ops.{operation}` is not differentiable: the gradient of rounding is zero, and kernels have none. "
        "Apply `jax.lax.stop_gradient(...)` to its operands, or define a gradient, such as a straight-through "
        "estimator, by `jax.custom_vjp`."
    )
