"""Refuses to differentiate a gather in forward mode, with a message that says what to do instead.

A gather is a `jax.custom_vjp` function. Forward mode (`jax.jvp`, or the function that `jax.linearize` returns) ends in
JAX's error for such functions, often where a program is compiled, far from the call. Therefore, the tangents of a
gather's inputs pass through a linear operation first. Reverse mode transposes it, and leaves nothing of it in the
compiled program. Where it is evaluated or compiled, it raises our error.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ._ties import is_float, is_real

_tangent = Primitive("gtp_tangent")


def refused_in_forward_mode(message: str, arrays: Any) -> Any:
    """Returns a tree of arrays. If their tangents are evaluated, a `TypeError` with this message is raised."""
    leaves, tree = jax.tree.flatten(arrays)
    floats = [i for i, leaf in enumerate(leaves) if is_real(leaf) and is_float(leaf)]
    for i, leaf in zip(floats, _refused(message, [leaves[i] for i in floats]), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _refused(message: str, arrays: list[Any]) -> list[Any]:
    del message
    return arrays


def _refused_jvp(message: str, primals: Any, tangents: Any) -> Any:
    (arrays,), (along,) = primals, list(tangents)
    along = [t if isinstance(t, SymbolicZero) else _tangent.bind(t, message=message) for t in along]
    return arrays, along  # not `_refused(...)`: a derivative of a gradient differentiates the gather's own rules


_refused.defjvp(_refused_jvp, symbolic_zeros=True)


def _raise(*_: Any, message: str, **__: Any) -> NoReturn:
    raise TypeError(message)


_tangent.def_impl(_raise)
_tangent.def_abstract_eval(lambda tangent, *, message: tangent)
ad.deflinear2(_tangent, lambda cotangent, tangent, *, message: [cotangent])
ad.primitive_jvps[_tangent] = _raise
batching.primitive_batchers[_tangent] = lambda tangents, dims, **how: (_tangent.bind(*tangents, **how), dims[0])
mlir.register_lowering(_tangent, lambda context, tangent, *, message: _raise(message=message))
