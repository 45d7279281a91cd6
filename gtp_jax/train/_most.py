"""Finds the largest value that an output of a jaxpr can have, as far as its operations and shapes show it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ..mesh import degrees
from ._needs import BY_PLACE, DECLARED, inner_jaxpr

_ELEMENTS = frozenset(
    "abs ceil concatenate convert_element_type copy copy_p device_put expand_dims floor max min name neg pad pvary "
    "reduce_max reduce_min reduce_precision reshape rev round sharding_constraint squeeze stop_gradient transpose "
    "broadcast_in_dim slice sort split".split()
)
_OF_FIRST = ("dynamic_slice", "gather")


def most_of(closed: Any, output: int) -> float:
    """Returns a number that the magnitude of an output does not exceed if no float among the inputs exceeds 1, as in a
    mask. Infinity if nothing shows one, as for a sum of integers or a declared count.

    Args:
        closed: the closed jaxpr.
        output: the number of the output, a scalar.
    """
    try:
        return _Reader(closed, None).of(closed.jaxpr.outvars[output])
    except RecursionError:
        return math.inf


class _Reader:
    """Reads a jaxpr backward from a value.

    Args:
        closed: the jaxpr, closed or not.
        inputs: functions that return what the inputs do not exceed; `None` for the inputs of the loss.
    """

    def __init__(self, closed: Any, inputs: Sequence[Callable[[], float]] | None) -> None:
        jaxpr = getattr(closed, "jaxpr", closed)
        self._made = {v: (eqn, place) for eqn in jaxpr.eqns for place, v in enumerate(eqn.outvars)}
        given = [functools.partial(_of_kind, v) for v in jaxpr.invars] if inputs is None else inputs
        self._given = dict(zip(jaxpr.invars, given, strict=True))
        self._known = {v: _of_kind(v) for v in jaxpr.constvars}

    def of(self, atom: Any) -> float:
        """Returns what the magnitude of a value does not exceed."""
        if isinstance(atom, core.Literal):
            return float(np.max(np.abs(atom.val))) if np.size(atom.val) else 0.0
        if atom not in self._known:
            found = self._given[atom]() if atom in self._given else self._of_result(*self._made[atom])
            self._known[atom] = 1.0 if atom.aval.dtype == jnp.bool_ else found
        return self._known[atom]

    def _of_result(self, eqn: core.JaxprEqn, place: int) -> float:
        name, params = eqn.primitive.name, eqn.params
        args: list[Any] = list(eqn.invars)
        outs: list[Any] = list(eqn.outvars)
        sizes = [math.prod(atom.aval.shape) for atom in (*args, *outs)]
        if name == "name" and params["name"] == DECLARED:
            return math.inf
        if name in BY_PLACE and len(args) == len(outs):
            return self.of(args[place]) * (degrees(params["axes"]) if name.startswith("psum") else 1)
        if name in _ELEMENTS:
            return max(map(self.of, args))
        if name in _OF_FIRST:
            return self.of(args[0])
        if name in ("add", "add_any", "sub"):
            return sum(map(self.of, args))
        if name == "mul":
            return _product(*map(self.of, args))
        if name == "div" and isinstance(args[1], core.Literal) and np.all(args[1].val):
            return self.of(args[0]) / float(np.min(np.abs(args[1].val)))
        if name == "select_n":
            return max(map(self.of, args[1:]))
        if name == "reduce_sum":
            return _product(sizes[0] / max(sizes[-1], 1), self.of(args[0]))
        if name == "cond":
            return max(self._within(branch, args[1:], place) for branch in params["branches"])
        inner = inner_jaxpr(eqn)
        return math.inf if inner is None else self._within(inner, args, place)

    def _within(self, closed: Any, args: Sequence[Any], place: int) -> float:
        given = [functools.partial(self.of, atom) for atom in args]
        return _Reader(closed, given).of(getattr(closed, "jaxpr", closed).outvars[place])


def _of_kind(v: Any) -> float:
    dtype: Any = getattr(v.aval, "dtype", None)
    return 1.0 if dtype is not None and (dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.floating)) else math.inf


def _product(*factors: float) -> float:
    return 0.0 if 0.0 in factors else math.prod(factors)
