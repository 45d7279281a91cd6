"""Evaluates a trace in steps, so that other operations can come in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from ..hook import is_reference
from ..mesh import degrees
from ._block_update import applied
from ._known_at import MOVES


class Slab(NamedTuple):
    """A part of a value along its first dimension.

    Attributes:
        shape: the shape of the part.
        at: the number of the equation after which it is known; -1 if it is known from the start.
        value: returns the part, and evaluates what it still needs.
    """

    shape: tuple[int, ...]
    at: int
    value: Callable[[], jax.Array]


class Evaluation:
    """The evaluation of a trace, some of whose equations have been evaluated.

    Attributes:
        outvars: the variables of the results.
    """

    def __init__(self, closed: Any, args: Sequence[Any]) -> None:
        self._eqns: list[Any] = closed.jaxpr.eqns
        self._known: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self._known |= zip(closed.jaxpr.invars, args, strict=True)
        self._made_by = {v: n for n, eqn in enumerate(self._eqns) for v in eqn.outvars}
        self._last_use = {
            v: n for n, eqn in enumerate(self._eqns) for v in eqn.invars if not isinstance(v, core.Literal)
        }
        # whether an equation must come after those before it, although it does not read their results
        self._in_order = any(map(_has_order, self._eqns))
        self._next = 0  # the number of the first equation that has not been reached
        self._fresh: list[Any] = []  # the variables of the equations since the last `before_rest`
        self.outvars: list[Any] = closed.jaxpr.outvars

    def value(self, var: Any) -> Any:
        """Returns the value of a variable or literal, and evaluates what it needs."""
        if isinstance(var, core.Literal):
            return var.val
        wanted, numbers = [var], set[int]()
        while wanted:
            one = wanted.pop()
            if isinstance(one, core.Literal) or one in self._known or self._made_by[one] in numbers:
                continue
            numbers.add(self._made_by[one])
            wanted += self._eqns[self._made_by[one]].invars
        if self._in_order and numbers:
            self.until(max(numbers))
        for number in sorted(numbers):
            self._evaluate(number)
        return self._known[var]

    def until(self, number: int) -> None:
        """Evaluates the equations up to this number."""
        for n in range(self._next, number + 1):
            if self._evaluate(n):
                self._fresh += self._eqns[n].outvars
        self._next = max(self._next, number + 1)

    def before_rest(self, values: list[jax.Array]) -> list[jax.Array]:
        """Returns its arguments. What later equations read of those that `until` has evaluated since the last call
        comes after these values."""
        waiting = [v for v in self._fresh if self._last_use.get(v, -1) >= self._next]
        waiting = [v for v in waiting if not is_reference(v) and jnp.issubdtype(v.aval.dtype, jnp.floating)]
        self._fresh = []
        if waiting:
            after, values = lax.optimization_barrier(([self._known[v] for v in waiting], values))
            self._known |= zip(waiting, after, strict=True)
        return values

    def results(self) -> list[Any]:
        """Evaluates the rest, and returns the results."""
        self.until(len(self._eqns) - 1)
        return [self.value(v) for v in self.outvars]

    def slabs(self, out: Any) -> list[Slab]:
        """Returns the parts of which a value is concatenated, such as the gradients of the layers of a stack; a single
        one if it is not.

        Args:
            out: a variable of at least one dimension.
        """
        number = -1 if isinstance(out, core.Literal) else self._made_by.get(out, -1)
        eqn = self._eqns[number] if number >= 0 else None
        if eqn is not None and len(eqn.invars) == len(eqn.outvars):
            name, operand = eqn.primitive.name, eqn.invars[eqn.outvars.index(out)]
            if name == "psum" and degrees(eqn.params["axes"]) == 1:
                return self.slabs(operand)
            if name == "convert_element_type":
                cast = lambda slab: lax.convert_element_type(slab.value(), eqn.params["new_dtype"])  # noqa: E731
                return [slab._replace(value=lambda slab=slab: cast(slab)) for slab in self.slabs(operand)]
        if eqn is not None and eqn.primitive.name == "concatenate" and eqn.params["dimension"] == 0:
            return [Slab(v.aval.shape, self._at(v), lambda v=v: self.value(v)) for v in eqn.invars]
        form: Any = out.aval
        return [Slab(form.shape, self._at(out), lambda: self.value(out))]

    def _at(self, var: Any) -> int:
        """Returns the number of the equation that computes a value, apart from moves of its elements. A barrier
        computes its results: it waits for all its operands."""
        while not isinstance(var, core.Literal) and (number := self._made_by.get(var, -1)) >= 0:
            eqn = self._eqns[number]
            if eqn.primitive.name not in MOVES or eqn.primitive.name == "optimization_barrier" or not eqn.invars:
                return number
            same = len(eqn.invars) == len(eqn.outvars)
            var = eqn.invars[eqn.outvars.index(var) if same else 0]
        return -1

    def _evaluate(self, number: int) -> bool:
        """Evaluates an equation, and returns whether that was still to be done."""
        eqn = self._eqns[number]
        if eqn.outvars and all(v in self._known for v in eqn.outvars):
            return False
        operands = [v.val if isinstance(v, core.Literal) else self._known[v] for v in eqn.invars]
        self._known |= zip(eqn.outvars, applied(eqn, operands), strict=True)
        return True


def _has_order(eqn: Any) -> bool:
    """Returns whether an equation reads or writes a reference, or has a side effect whose order matters."""
    ordered = any("Ordered" in type(effect).__name__ for effect in eqn.effects)
    return ordered or any(is_reference(v) for v in (*eqn.invars, *eqn.outvars))
