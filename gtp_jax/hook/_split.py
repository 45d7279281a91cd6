"""Splits the jaxpr of a walk at the calls of units, into a prologue, one part for each call, and an epilogue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal, Var

from ..chain import is_float, separated
from ._jaxprs import is_reference

# Floats that are needed only after the last call leave the chain where they are computed, unless they have this many
# elements or more. These are passed along the chain, and so are their gradients, which takes less memory.
_LARGE = 1 << 16


@dataclasses.dataclass(frozen=True)
class Part:
    """One call of a unit, with the equations before it that it, or a later call, needs.

    Attributes:
        eqns: these equations, in order.
        call: the equation of the call.
        x: the variables that the call before it passes on.
        y: the variables that it passes on to the next call; for the last call, to the epilogue.
        params: the floats from before the chain that this part alone reads, except operands of `before` (see `split`).
        constants: the other arrays from before the chain that it reads, except operands of `before` (see `split`).
        scalars: the floats that only the epilogue reads, computed in this part.
        state: the other arrays that only the epilogue reads, computed in this part.
    """

    eqns: tuple[Any, ...]
    call: Any
    x: tuple[Var, ...]
    y: tuple[Var, ...]
    params: tuple[Var, ...]
    constants: tuple[Var, ...]
    scalars: tuple[Var, ...]
    state: tuple[Var, ...]


@dataclasses.dataclass(frozen=True)
class Split:
    """The jaxpr of a walk in parts.

    Attributes:
        prologue: the equations that are evaluated before the chain, in order.
        parts: one part for each call of a unit.
        epilogue: the equations that are evaluated after the chain, in order.
        shared: the floats from before the chain that several parts read.
    """

    prologue: tuple[Any, ...]
    parts: tuple[Part, ...]
    epilogue: tuple[Any, ...]
    shared: tuple[Var, ...]


def can_split(jaxpr: Jaxpr, is_call: Callable[[Any], bool], before: Callable[[Any], Sequence[Any]]) -> bool:
    """Returns whether a jaxpr can be split: no equation besides the calls has an effect, which splitting could reorder,
    and no call computes an operand that is needed before the chain."""
    after: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.effects and not is_call(eqn):
            return False
        if is_call(eqn) and any(v in after for v in variables(before(eqn))):
            return False
        if is_call(eqn) or any(v in after for v in variables(eqn.invars)):
            after.update(eqn.outvars)
    return not any(map(is_reference, (*jaxpr.invars, *jaxpr.constvars)))


def split(jaxpr: Jaxpr, is_call: Callable[[Any], bool], before: Callable[[Any], Sequence[Any]]) -> Split:
    """Splits a jaxpr. Equations that do not depend on a call and are read in one part alone belong to that part, except
    constraints of shardings.

    Args:
        jaxpr: the jaxpr, for which `can_split` is true, and which has at least one call.
        is_call: returns whether an equation is a call of a unit.
        before: returns the operands of a call that are computed before the chain, such as those that are gathered.
    """
    count = sum(map(is_call, jaxpr.eqns))
    places = _places(jaxpr, is_call, before, count)
    prologue = [eqn for eqn in jaxpr.eqns if places[id(eqn)] < 0]
    epilogue = [eqn for eqn in jaxpr.eqns if places[id(eqn)] == count]
    of_part: list[list[Any]] = [[] for _ in range(count)]
    calls: list[Any] = []
    for eqn in jaxpr.eqns:
        if is_call(eqn):
            calls.append(eqn)
        elif 0 <= places[id(eqn)] < count:
            of_part[places[id(eqn)]].append(eqn)
    made = {v: k for k in range(count) for eqn in (*of_part[k], calls[k]) for v in eqn.outvars}
    reads = [_reads(of_part[k], calls[k], before(calls[k])) for k in range(count)]
    at_end = {v for v in (*variables(jaxpr.outvars), *(v for eqn in epilogue for v in variables(eqn.invars)))}
    last = {v: max((k for k in range(count) if v in reads[k]), default=made[v]) for v in made}
    leave = {v for v in made if v in at_end and made[v] < count - 1 and not _is_large_float(v)}
    last |= {v: count for v in made if v in at_end and v not in leave}
    readers: dict[Any, int] = {}
    for v in (v for own in reads for v in own if v not in made):
        readers[v] = readers.get(v, 0) + 1
    shared = tuple(v for v in readers if readers[v] > 1 and is_float(v.aval))
    parts = []
    for k in range(count):
        own = [v for v in reads[k] if v not in made and v not in shared]
        x, y = (tuple(v for v in made if made[v] < j <= last[v]) for j in (k, k + 1))
        left = [v for v in made if made[v] == k and v in leave]
        (params, constants), (scalars, state) = _by_dtype(own), _by_dtype(left)
        parts.append(Part(tuple(of_part[k]), calls[k], x, y, params, constants, scalars, state))
    return Split(tuple(prologue), tuple(parts), tuple(epilogue), shared)


def _places(jaxpr: Jaxpr, is_call: Callable[[Any], bool], before: Callable[[Any], Any], count: int) -> dict[int, int]:
    """Returns, by the `id` of each equation, the part in which it is evaluated; -1 for the prologue, and the number of
    parts for the epilogue."""
    after, places, seen = set[Any](), dict[int, int](), 0
    for eqn in jaxpr.eqns:
        if is_call(eqn):
            places[id(eqn)] = seen
            seen += 1
        elif any(v in after for v in variables(eqn.invars)):
            places[id(eqn)] = seen
        else:
            continue
        after.update(eqn.outvars)
    readers: dict[Any, set[int]] = {v: {count} for v in variables(jaxpr.outvars)}
    for eqn in reversed(jaxpr.eqns):
        if id(eqn) not in places:
            found = set[int]().union(*(readers.get(v, ()) for v in eqn.outvars))
            # before the first call, there is nothing to wait for; and a part would save for backward what it makes of a
            # parameter, such as a constrained one, besides the parameter
            alone = len(found) == 1 and 0 not in found and eqn.primitive.name != "sharding_constraint"
            places[id(eqn)] = found.pop() if alone else -1
        ahead = len(before(eqn)) if is_call(eqn) else 0
        for i, v in enumerate(eqn.invars):
            if not isinstance(v, Literal):
                readers.setdefault(v, set()).add(-1 if i < ahead else places[id(eqn)])
    return places


def _reads(eqns: Iterable[Any], call: Any, before: Sequence[Any]) -> dict[Any, None]:
    """Returns the variables that a part reads and does not compute, in order, except operands of `before`."""
    made, found = set[Any](), dict[Any, None]()
    for eqn in (*eqns, call):
        given = eqn.invars[len(before) :] if eqn is call else eqn.invars
        found |= dict.fromkeys(v for v in variables(given) if v not in made)
        made.update(eqn.outvars)
    return found


def variables(atoms: Iterable[Any]) -> list[Var]:
    """Returns the variables among the operands of an equation."""
    return [v for v in atoms if not isinstance(v, Literal)]


def _by_dtype(own: Sequence[Var]) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
    """Returns the floats among variables, and the others."""
    floats, others = separated(own, [is_float(v.aval) for v in own])
    return tuple(floats), tuple(others)


def _is_large_float(v: Var) -> bool:
    return is_float(v.aval) and v.aval.size >= _LARGE  # pyright: ignore[reportAttributeAccessIssue]
