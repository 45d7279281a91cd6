"""Finds the array that an output of a jaxpr is, which shows whether code has written an `nnx.Variable`.

`nnx.jit` and `nnx.remat` put a new array into every variable that they are given, even if the code within them does not
write it. Only a jaxpr shows that the new array is the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Jaxpr, Literal

from ._jaxprs import CALLS, scan_counts

# Operations that return their operands unchanged, one for one.
_UNCHANGED = ("optimization_barrier", "sharding_constraint")
_PART = "part_of_new_value"  # the name that JAX records for the calls that `part_of_new_value` makes


class Sources:
    """Finds the arrays that values in a jaxpr are. It looks into calls, loops and branches.

    Args:
        jaxpr: the jaxpr.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._jaxpr = jaxpr
        self._made = {variable: (eqn, i) for eqn in jaxpr.eqns for i, variable in enumerate(eqn.outvars)}

    def input_of(self, output: int) -> int | None:
        """Returns the index of the input that an output is, unchanged; `None` if the output is not an input."""
        return _index(self._jaxpr.invars, self.of(self._jaxpr.outvars[output]))

    def of(self, variable: Any) -> Any:
        """Traces a variable back through operations that return it unchanged, and returns the first variable that has
        its value."""
        while not isinstance(variable, Literal) and variable in self._made:
            eqn, output = self._made[variable]
            before = self._operand(eqn, output)
            if before is None:
                break
            variable = before
        return variable

    def _operand(self, eqn: Any, output: int) -> Any:
        """Returns the operand that an output of an operation is, unchanged; `None` if there is none."""
        name, params = eqn.primitive.name, eqn.params
        if name in _UNCHANGED:
            return eqn.invars[output]
        if name in CALLS and params.get("name") == _PART:
            shard, weight, now = eqn.invars
            return shard if self.of(now) is self.of(weight) else None
        if name in CALLS or name.startswith(("custom_vjp_call", "custom_jvp_call")):
            return _at(eqn.invars, _input_of(params.get("jaxpr", params.get("call_jaxpr")), output))
        if name == "cond":
            places = {_input_of(branch, output) for branch in params["branches"]}
            return _at(eqn.invars[1:], places.pop()) if len(places) == 1 else None
        if name == "while":
            carried = _input_of(params["body_jaxpr"], output) == params["body_nconsts"] + output
            return eqn.invars[params["cond_nconsts"] + params["body_nconsts"] + output] if carried else None
        if name == "scan":  # an output is carried, or has a slice per iteration
            place, (consts, carries) = _input_of(params["jaxpr"], output), scan_counts(params)
            same = place == consts + output if output < carries else place is not None and place >= consts + carries
            return eqn.invars[place] if same else None
        return None


def inputs_returned(function: Callable[[Any], Any], given: Any) -> list[int | None]:
    """Traces a function, and returns, for each array that it returns, the number of the array among the leaves of
    `given` that it is, unchanged; `None` for a new array."""
    jaxpr = jax.make_jaxpr(function)(given).jaxpr
    sources = Sources(jaxpr)
    return [sources.input_of(output) for output in range(len(jaxpr.outvars))]


def part_of_new_value(part: Callable[[jax.Array], jax.Array], shard: Any, weight: Any, now: Any) -> Any:
    """Returns `part(now)`, the shard of a weight's new value. In a trace, `Sources` takes it for `shard` if `now` is
    `weight`.

    Args:
        part: a function from a gathered weight to its shard.
        shard: the shard of the weight before a call.
        weight: the gathered weight.
        now: the new value, which the call has put in its place.
    """
    if not isinstance(now, Tracer):
        return part(now)

    def part_of_new_value(shard: Any, weight: Any, now: Any) -> Any:
        del shard, weight
        return part(now)

    return jax.jit(part_of_new_value)(shard, weight, now)


def _input_of(jaxpr: Any, output: int) -> int | None:
    return Sources(getattr(jaxpr, "jaxpr", jaxpr)).input_of(output)


def _at(values: Sequence[Any], place: int | None) -> Any:
    return None if place is None else values[place]


def _index(variables: Sequence[Any], variable: Any) -> int | None:
    return next((i for i, one in enumerate(variables) if one is variable), None)
