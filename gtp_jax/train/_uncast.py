"""Returns gradients before the cast to the dtype of their parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

Tree = Any


def uncast[**P, Rest](function: Callable[P, tuple[Tree, Rest]]) -> Callable[P, tuple[Tree, Rest]]:
    """Returns the function without the casts to wider dtypes that are the last operations on its first output.

    JAX returns a gradient in the dtype of its parameter, although it may have been summed in 16 bits and cast only
    afterwards. XLA would write such a gradient to memory in 32 bits before a branch that uses it. A caller that casts
    the outputs again gets the same values, bit for bit. If something was added to a gradient after its cast (a weight
    used twice, a sum over replicas), the cast is not the last operation, and the gradient is returned unchanged.

    Args:
        function: returns a pair, whose first element is a pytree of arrays.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> tuple[Tree, Rest]:
        narrow, _ = traced_uncast(functools.partial(function, **kwargs), *args)
        return narrow(*args)

    return call


def traced_uncast(function: Callable[..., tuple[Tree, Tree]], *args: Any) -> tuple[Callable[..., Any], Any]:
    """Traces a function once.

    Args:
        function: the function, as for `uncast`.
        args: its arguments, or their shapes and dtypes.

    Returns:
        `uncast(function)` for arguments of these shapes and dtypes; and the shapes and dtypes of what `function`
        returns.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    structure = jax.tree.structure(shapes)
    first = jax.tree.structure(shapes[0]).num_leaves
    jaxpr = closed.jaxpr
    casts = {out: eqn for eqn in jaxpr.eqns if eqn.primitive.name == "convert_element_type" for out in eqn.outvars}
    outvars = [_before_cast(v, casts) for v in jaxpr.outvars[:first]] + jaxpr.outvars[first:]
    narrow = core.jaxpr_as_fun(closed.replace(jaxpr=jaxpr.replace(outvars=outvars)))
    return lambda *args: jax.tree.unflatten(structure, narrow(*jax.tree.leaves(args))), shapes


def _before_cast(out: Any, casts: dict[Any, Any]) -> Any:
    """Returns what a variable was cast from, if the cast loses nothing; otherwise the variable."""
    if isinstance(out, core.Literal) or out not in casts:
        return out
    (source,) = casts[out].invars
    wide, narrow = out.aval.dtype, source.aval.dtype
    floats = jnp.issubdtype(wide, jnp.floating) and jnp.issubdtype(narrow, jnp.floating)
    lossless = floats and narrow != wide and _holds(jnp.finfo(wide), jnp.finfo(narrow))
    return source if lossless and not isinstance(source, core.Literal) else out


def _holds(wide: Any, narrow: Any) -> bool:
    """Returns whether a float format represents every finite number of another one."""
    return wide.nmant >= narrow.nmant and wide.maxexp >= narrow.maxexp and wide.minexp <= narrow.minexp
