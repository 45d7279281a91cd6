"""Searches jaxprs, including those that are nested in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import Jaxpr

# Primitives that evaluate their jaxpr once, and return its outputs.
CALLS = ("pjit", "jit", "closed_call", "core_call", "checkpoint", "remat", "remat2")


def inner_jaxprs(eqn: Any) -> list[Jaxpr]:
    """Returns the jaxprs among the parameters of an operation, such as the body of a loop."""
    each = [one for value in eqn.params.values() for one in (value if isinstance(value, tuple | list) else (value,))]
    return [inner for one in each if isinstance(inner := getattr(one, "jaxpr", one), Jaxpr)]


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the number of constants and of carried values of a scan, given the operation's parameters."""
    if "num_consts" in params:  # before jax 0.12
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carries))


def is_reference(v: Any) -> bool:
    """Returns whether a variable of a jaxpr is a mutable array, which operations change in place."""
    return hasattr(v.aval, "inner_aval")


def custom_vjps(jaxpr: Jaxpr) -> list[str]:
    """Returns, for each call of a `jax.custom_vjp` function in a jaxpr, the function's name and source location, as JAX
    has recorded them."""
    calls = (eqn for eqn in _operations(jaxpr) if eqn.primitive.name.startswith("custom_vjp_call"))
    return [str(inner_jaxprs(eqn)[0].debug_info.func_src_info) for eqn in calls]


def in_forward_mode(jaxpr: Jaxpr) -> list[str]:
    """Returns, for each call of a `jax.custom_vjp` function that a jaxpr differentiates in forward mode, the name that
    JAX has recorded for the backward rule. JAX raises an error if such a jaxpr is evaluated."""
    return [eqn.params["bwd"].__name__ for eqn in _operations(jaxpr) if eqn.primitive.name == "custom_lin"]


def _operations(jaxpr: Jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from _operations(inner)
