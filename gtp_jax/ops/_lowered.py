"""Defers the tracing of a function until a program that runs it is lowered.

`jax.lax.platform_dependent` traces every alternative. Tracing a reference takes a tenth of a second, but few programs
are compiled for a platform without kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

_call = Primitive("gtp_traced_when_lowered")
_call.multiple_results = True


def traced_when_lowered(function: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function as one operation, which is traced when a program that contains it is lowered.

    Args:
        function: a hashable function of arrays, with one result or several.
        like: a function that is fast to trace, with results of the same structure, shapes and dtypes.
    """

    def call(*operands: Any) -> Any:
        leaves, tree = jax.tree.flatten(operands)
        traced, shapes = jax.make_jaxpr(like, return_shape=True)(*operands)
        results = _call.bind(*leaves, function=function, tree=tree, avals=tuple(traced.out_avals))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def _leaves(*leaves: Any, function: Callable[..., Any], tree: Any, **_: Any) -> list[Any]:
    return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))


@_call.def_abstract_eval
def _avals(*_: Any, avals: Any, **__: Any) -> Any:
    return list(avals)


def _batched(operands: Any, dims: Any, **params: Any) -> Any:
    results = jax.vmap(lambda *leaves: _leaves(*leaves, **params), in_axes=tuple(dims))(*operands)
    return results, [0] * len(results)


_call.def_impl(_leaves)
mlir.register_lowering(_call, mlir.lower_fun(_leaves, multiple_results=True))
batching.primitive_batchers[_call] = _batched
