"""Removes the final cast of gradients to the wider dtype of their parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ..mesh import degrees
from ._needs import numbered

Tree = Any


# A function of a closed jaxpr, and of pytrees with the numbers of its inputs and outputs in their places.
Examine = Callable[[Any, Any, Any], None]


def uncast[**P, Rest](
    function: Callable[P, tuple[Tree, Rest]], examine: Examine | None = None
) -> Callable[P, tuple[Tree, Rest]]:
    """Returns a function that leaves out the final casts to wider dtypes in its first output.

    JAX returns a gradient in the dtype of its parameter, such as float32, even if the gradient was summed in 16 bits
    and cast only afterwards. XLA would then write the gradient to memory in 32 bits before a `lax.cond` that uses it.
    Without the cast it is written in 16 bits. A caller that casts the outputs itself gets the same values, bit for bit.

    If something was added to a gradient after its cast (a weight used twice, a sum over replicas), the cast is not the
    last operation, and the gradient is returned unchanged.

    Args:
        function: a function that returns a pair, whose first element is a pytree of arrays.
        examine: a function that is called with the trace of `function`.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> tuple[Tree, Rest]:
        narrow, _ = traced_uncast(functools.partial(function, **kwargs), *args, examine=examine)
        return narrow(*args)

    return call


def traced_uncast(
    function: Callable[..., tuple[Tree, Tree]], *args: Any, examine: Examine | None = None
) -> tuple[Callable[..., Any], Any]:
    """Traces a function once, and applies `uncast` to the trace.

    Args:
        function: the function, as for `uncast`.
        args: its arguments, or their shapes and dtypes.
        examine: as for `uncast`.

    Returns:
        `uncast(function)` for arguments of these shapes and dtypes; and the shapes and dtypes of what `function`
        returns.
    """
    closed, shapes = trace_uncast(function, *args, examine=examine)
    structure, narrow = jax.tree.structure(shapes), core.jaxpr_as_fun(closed)
    return lambda *args: jax.tree.unflatten(structure, narrow(*jax.tree.leaves(args))), shapes


def trace_uncast(
    function: Callable[..., tuple[Tree, Tree]], *args: Any, examine: Examine | None = None
) -> tuple[Any, Any]:
    """Returns the closed jaxpr of `uncast(function)`, and the shapes and dtypes of what `function` returns. The
    arguments are those of `traced_uncast`."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    if examine is not None:
        examine(closed, numbered(args), numbered(shapes))
    first = jax.tree.structure(shapes[0]).num_leaves
    return closed.replace(jaxpr=_uncast(closed.jaxpr, range(first))), shapes


def _uncast(jaxpr: core.Jaxpr, chosen: Iterable[int]) -> core.Jaxpr:
    """Returns a jaxpr without the lossless casts that end the computation of some of its outputs.

    Only a constraint on the sharding, or a sum over a single rank, may follow such a cast. The cast may also be inside
    a `shard_map` whose result is the output.

    Args:
        jaxpr: the jaxpr.
        chosen: the indices of these outputs.
    """
    wanted = {v for v in (jaxpr.outvars[i] for i in chosen) if isinstance(v, core.Var)}
    others = [v for i, v in enumerate(jaxpr.outvars) if i not in set(chosen)]
    wanted -= {v for v in (*others, *(v for eqn in jaxpr.eqns for v in eqn.invars)) if isinstance(v, core.Var)}
    instead: dict[Any, Any] = {}
    eqns = [_uncast_within(eqn, wanted, instead) if eqn.primitive.name == "shard_map" else eqn for eqn in jaxpr.eqns]
    made = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    found = [_before_cast(v, made, eqns) if i in set(chosen) else v for i, v in enumerate(jaxpr.outvars)]
    return jaxpr.replace(eqns=eqns, outvars=[instead.get(v, v) if isinstance(v, core.Var) else v for v in found])


def _uncast_within(eqn: core.JaxprEqn, wanted: set[Any], instead: dict[Any, Any]) -> core.JaxprEqn:
    """Returns a `shard_map` whose function lacks the final lossless casts of some outputs.

    Args:
        eqn: the `shard_map`.
        wanted: the outputs whose final casts are to be removed.
        instead: a dict to which this adds the new variable for each output whose dtype changes.
    """
    inner: Any = eqn.params["jaxpr"]
    without: Any = _uncast(inner, [i for i, v in enumerate(eqn.outvars) if v in wanted])
    outvars = list(eqn.outvars)
    for i, (old, new) in enumerate(zip(inner.outvars, without.outvars, strict=True)):
        if old.aval.dtype != new.aval.dtype:
            aval: Any = eqn.outvars[i].aval
            outvars[i] = instead[eqn.outvars[i]] = core.Var(aval.update(dtype=new.aval.dtype))
    return eqn.replace(params={**eqn.params, "jaxpr": without}, outvars=outvars)


def _before_cast(out: Any, made: dict[Any, Any], eqns: list[core.JaxprEqn]) -> Any:
    """Returns the variable from which `out` was cast, if the cast is lossless; otherwise `out`.

    A constraint on the sharding that follows the cast is applied to the narrower variable instead. A sum over one rank,
    which JAX adds for mesh axes of size 1, is left out if it follows the cast.

    Args:
        out: the variable.
        made: for each variable, the equation that computes it.
        eqns: a list to which new constraints are appended.
    """
    eqn = None if isinstance(out, core.Literal) else made.get(out)
    if eqn is None or not eqn.invars:
        return out
    source = eqn.invars[eqn.outvars.index(out)] if len(eqn.outvars) == len(eqn.invars) else eqn.invars[0]
    found = _before_cast(source, made, eqns) if eqn.primitive.name in ("sharding_constraint", "psum") else source
    if eqn.primitive.name == "psum" and found is not source and degrees(eqn.params["axes"]) == 1:
        return found
    if eqn.primitive.name == "sharding_constraint" and found is not source:
        constrained = core.Var(out.aval.update(dtype=found.aval.dtype))
        eqns.append(eqn.replace(invars=[found], outvars=[constrained]))
        return constrained
    return source if eqn.primitive.name == "convert_element_type" and _is_lossless(source, out) else out


def _is_lossless(source: Any, out: Any) -> bool:
    wide, narrow = out.aval.dtype, source.aval.dtype
    floats = jnp.issubdtype(wide, jnp.floating) and jnp.issubdtype(narrow, jnp.floating)
    return (
        floats
        and narrow != wide
        and _holds(jnp.finfo(wide), jnp.finfo(narrow))
        and not isinstance(source, core.Literal)
    )


def _holds(wide: Any, narrow: Any) -> bool:
    """Returns whether the float format `wide` represents every finite number of the format `narrow`."""
    return wide.nmant >= narrow.nmant and wide.maxexp >= narrow.maxexp and wide.minexp <= narrow.minexp
