"""Calls an operation on codes by the name that it has in `reference` and in `native`: on each platform, the kernel that
it has, or the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ... import native
from ...mesh import platform, runs_kernels
from .. import reference
from .._implementation import Implementation, runs_native

# The names of a platform in `lax.platform_dependent`, in the FFI registry, and in `gtp_jax.mesh.platform`.
_PLATFORMS = (("cpu", "cpu", "cpu"), ("cuda", "CUDA", "gpu"))

_deferred = Primitive("gtp_traced_when_lowered")
_deferred.multiple_results = True


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
    return jax.lax.platform_dependent(*operands, **kernels, default=_traced_when_lowered(by(reference), by(native)))


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


def _traced_when_lowered(function: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function as one operation, which is traced when a program that contains it is lowered.

    `jax.lax.platform_dependent` traces every alternative. Tracing a reference takes a tenth of a second, but few
    programs are compiled for a platform without kernels.

    Args:
        function: a hashable function of arrays, with one result or several.
        like: a function that is fast to trace, with results of the same structure, shapes and dtypes.
    """

    def call(*operands: Any) -> Any:
        leaves, tree = jax.tree.flatten(operands)
        traced, shapes = jax.make_jaxpr(like, return_shape=True)(*operands)
        results = _deferred.bind(*leaves, function=function, tree=tree, avals=tuple(traced.out_avals))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def _leaves(*leaves: Any, function: Callable[..., Any], tree: Any, **_: Any) -> list[Any]:
    return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))


@_deferred.def_abstract_eval
def _avals(*_: Any, avals: Any, **__: Any) -> Any:
    return list(avals)


def _batched(operands: Any, dims: Any, **params: Any) -> Any:
    results = jax.vmap(lambda *leaves: _leaves(*leaves, **params), in_axes=tuple(dims))(*operands)
    return results, [0] * len(results)


_deferred.def_impl(_leaves)
mlir.register_lowering(_deferred, mlir.lower_fun(_leaves, multiple_results=True))
batching.primitive_batchers[_deferred] = _batched
