"""Finds the weights whose gradients a call may compute in a float dtype narrower than float32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal

from ._jaxprs import CALLS, inner_jaxprs
from ._products import is_narrow

# The numbers of the weights from which a value is computed, if the value, or a part of it, may be computed from weights
# alone. Literals, the conditions of branches and loops, and numbers of iterations do not count. `None` for any other
# value, such as an argument of the call or an array constant.
Origin = frozenset[int] | None

# Primitives that evaluate each of their jaxprs at most once, and return its outputs.
_RETURNING = (*CALLS, "cond", "custom_jvp_call", "custom_vjp_call", "shard_map")


def narrowed(jaxpr: Jaxpr, inputs: Sequence[Origin]) -> set[int]:
    """Returns the numbers of the weights that a jaxpr, or one nested in it, may hold in a float dtype narrower than
    float32, as an input or as a value computed from weights alone (`Origin`).

    Assumes that a `cond` may take any branch, and that a `while` may run any number of times. Takes the inputs of other
    nested jaxprs, except the body of a `scan`, to be the last operands of the operation. If there are more inputs than
    operands, as in a Pallas kernel, counts every weight in the origins of the operands.

    Args:
        jaxpr: the jaxpr.
        inputs: the origin of each input.
    """
    found = set[int]()
    _followed(jaxpr, inputs, found)
    return found


def _followed(jaxpr: Jaxpr, inputs: Sequence[Origin], found: set[int]) -> list[Origin]:
    """Returns the origin of each output of a jaxpr, and adds to `found` the weights that `narrowed` returns for
    the jaxpr."""
    known: dict[Any, Origin] = {}

    def origin(v: Any) -> Origin:
        return frozenset() if isinstance(v, Literal) else known.get(v)

    def note(variables: Sequence[Any], origins: Sequence[Origin]) -> None:
        known.update(zip(variables, origins, strict=True))
        for v, own in zip(variables, origins, strict=True):
            if own and is_narrow(v.aval.dtype):
                found.update(own)

    note(jaxpr.invars, inputs)
    for eqn in jaxpr.eqns:
        note(eqn.outvars, _of_outputs(eqn, [origin(v) for v in eqn.invars], found))
    return [origin(v) for v in jaxpr.outvars]


def _of_outputs(eqn: Any, read: Sequence[Origin], found: set[int]) -> list[Origin]:
    """Returns the origin of each output of an operation, given those of its operands, and adds to `found` the weights
    that `narrowed` returns for jaxprs nested in the operation."""
    name = eqn.primitive.name
    if name == "scan":
        return _of_scan(eqn, read, found)
    if name == "while":  # the operands are the constants of both jaxprs, and then the carry
        of_condition, both = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        condition, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
        fixed, states = read[of_condition:both], [list(read[both:])]
        while (state := _followed(body, [*fixed, *states[-1]], found)) not in states:
            states.append(state)
        for state in states:
            _followed(condition, [*read[:of_condition], *state], found)
        return _either(states)
    alone = [_joined(read)] * len(eqn.outvars)
    each = []
    for inner in inner_jaxprs(eqn) if any(read) else ():
        if len(inner.invars) > len(read):
            found.update(*(own for own in read if own))
        else:  # the index of a branch comes before its operands
            each.append(_followed(inner, read[len(read) - len(inner.invars) :], found))
    return _either(each) if each and name in _RETURNING else alone


def _of_scan(eqn: Any, read: Sequence[Origin], found: set[int]) -> list[Origin]:
    (body,), length = inner_jaxprs(eqn), eqn.params["length"]
    # the operands are, in this order, constants, the carry, and the arrays whose slices the body reads; the outputs are
    # the carry, and then the arrays whose slices the body returns
    sliced, returned = (
        sum(v.aval.shape != inner.aval.shape for v, inner in zip(own, of_body, strict=True))  # pyright: ignore
        for own, of_body in ((eqn.invars, body.invars), (eqn.outvars, body.outvars))
    )
    carried = len(eqn.outvars) - returned
    start, end = len(read) - sliced - carried, len(read) - sliced
    if length == 0:  # the body is not evaluated, and the arrays of slices are empty
        return [*read[start:end], *[None] * returned]
    states, slices = [list(read[start:end])], []
    while len(states) <= length:
        outputs = _followed(body, [*read[:start], *states[-1], *read[end:]], found)
        slices.append(outputs[carried:])
        if (state := outputs[:carried]) in states:  # from here on, the states repeat
            first = states.index(state)
            return [*states[first + (length - first) % (len(states) - first)], *_either(slices)]
        states.append(state)
    return [*states[-1], *_either(slices)]


def _joined(origins: Iterable[Origin]) -> Origin:
    """Returns the origin of a value that is computed from several values, given the origins of these."""
    each = list(origins)
    return None if None in each else frozenset[int]().union(*(own for own in each if own))


def _either(alternatives: Sequence[Sequence[Origin]]) -> list[Origin]:
    """Returns, for each of several values, the union of those of its origins that are not `None`; `None` if there are
    no such origins.

    Args:
        alternatives: lists with one origin for each value, such as one list for each branch of a `cond`.
    """
    known = [[own for own in each if own is not None] for each in zip(*alternatives, strict=True)]
    return [_joined(each) if each else None for each in known]
