"""Refuses to differentiate a gather in forward mode, with a message that says what to do instead.

A gather is a `jax.custom_vjp` function. Forward mode (`jax.jvp`, or the function that `jax.linearize` returns) ends in
JAX's error for such functions, often where a program is compiled, far from the call. Therefore, the tangents of a
gather's inputs pass through a linear operation first. Reverse mode transposes it, and leaves nothing of it in the
compiled program. Where it is evaluated or compiled, it raises our error.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from ..chain import is_float, with_changed
from ._jaxprs import custom_vjps, in_forward_mode

# The beginning of JAX's error for a `jax.custom_vjp` function that is differentiated in forward mode.
FORWARD = "can't apply forward-mode"
# Words of JAX's error for a forward-mode derivative of such a function that is differentiated again.
_NO_RULE = "rule for 'custom_lin'"

_tangent = Primitive("gtp_tangent")


@contextlib.contextmanager
def forward_mode_refused(owner: str, jaxpr: Jaxpr | None = None) -> Iterator[str]:
    """Yields the message of the error for a gather that is differentiated in forward mode, and replaces JAX's errors
    with this error. If `jaxpr` itself differentiates `jax.custom_vjp` functions in forward mode, the new error says so
    instead, and names the backward rule of the first.

    Args:
        owner: the class of the module whose weights are gathered.
        jaxpr: the jaxpr of the module's own code, if that code runs in this context.
    """
    instead = (
        ", or, in global view, call the model under `with gtp_jax.hook.without_hook():`, where XLA gathers the weights"
    )
    if jaxpr is not None and (functions := custom_vjps(jaxpr)):
        instead = (
            "; `gtp_jax.hook.without_hook` may not help, because the module also calls the `jax.custom_vjp` function "
            f"{functions[0]}, which JAX cannot differentiate in forward mode"
        )
    message = (
        f"{owner}, sharded by `gtp_jax.shard`, is differentiated in forward mode (`jax.jvp`, "
        f"`jax.jacfwd`, `jax.linearize`), which its gathers do not support. Use reverse mode{instead}."
    )
    try:
        yield message
    except (NotImplementedError, TypeError) as error:
        if not any(words in str(error) for words in (FORWARD, _NO_RULE)):
            raise
        if jaxpr is not None and (rules := in_forward_mode(jaxpr)):
            raise of_own_code(owner, f"the one with the backward rule `{rules[0]}`") from error
        raise TypeError(message) from error


def of_own_code(owner: str, which: str) -> TypeError:
    return TypeError(
        f"a `jax.custom_vjp` function that {owner} calls is differentiated in forward mode (`jax.jvp`, "
        f"`jax.jacfwd`), which JAX does not support: {which}. Use reverse mode, or define its derivative "
        "with `jax.custom_jvp` instead."
    )


def refused_in_forward_mode(message: str, arrays: Any) -> Any:
    """Returns a tree of arrays. If their tangents are evaluated, a `TypeError` with this message is raised."""
    return with_changed(arrays, is_float, functools.partial(_refused, message))


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
