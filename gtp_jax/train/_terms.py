"""Reads the jaxpr of an optimizer's update, and determines how each output is computed from the inputs.

A function is represented by a term: a number that identifies an operation and the terms of its arguments, regardless
of shapes. So an update of stacked arrays, which have a leading dimension of layers, can be compared with the update of
the arrays of one layer.

[Note: layers in a list and layers in one array] A norm of a whole tree, such as that of `optax.clip_by_global_norm`,
adds up one sum per array. The sum over a stacked array equals the sum over the separate arrays of its layers, so it
does not matter how the layers are stored. The norm of a single array, as LAMB uses it, does differ: a stacked array has
one norm for all its layers. So the reduction of a whole array is recorded as a total. If the totals of several
parameters are added, nothing depends on how layers are stored. If any other operation reads the total of a single
stacked parameter, the update treats the layers of that parameter as one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..mesh import Path, of_parameter, with_paths

_NONE: frozenset[Path] = frozenset()
CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat",
    "remat2",
    "checkpoint",
)
COPIES = ("copy", "copy_p", "stop_gradient", "pvary")
_SAME = (*COPIES, "squeeze", "reshape", "broadcast_in_dim", "expand_dims")
_TOTALS = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_and": "and", "reduce_or": "or"}
ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp conj "
    "convert_element_type cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow "
    "is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or population_count pow real "
    "reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh "
    "sqrt square sub tan tanh xor".split()
)


def called_jaxpr(eqn: Any) -> Any:
    """Returns the jaxpr, closed or not, that an operation calls; `None` for one that calls none."""
    return next((eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params), None)


class Value(NamedTuple):
    """A description of one array in an update: the function of the update's inputs that computes it.

    Attributes:
        term: the term of the function. Equal terms identify equal functions, whatever the shapes of the inputs, with
            one exception: all values that `_opaque` returns for several parameters, of which one or more are stacked,
            have the same term. For a total, a set with the term of each reduction that is combined in it.
        owners: the parameters to which the elements of the array belong; empty if they belong to none, as for a step
            count or a norm of the whole tree.
        depends: the paths of all inputs on which the array depends.
        as_one: the stacked parameters whose layers are treated as one tensor to compute the array.
        random: whether the array depends on random numbers.
        total: for a reduction of whole arrays, the operation that combines it with other such reductions, such as
            `add`; otherwise `None`.
        apart: whether the array is a vector of totals that have not been combined yet.
    """

    term: Hashable
    owners: frozenset[Path] = _NONE
    depends: frozenset[Path] = _NONE
    as_one: frozenset[Path] = _NONE
    random: bool = False
    total: str | None = None
    apart: bool = False


def input_values(inputs: Any, parameters: Iterable[Path]) -> list[Value]:
    """Returns the `Value` of each input of an update. A parameter owns the inputs that belong to it (`of_parameter`).
    Other inputs, such as counts, have no owner."""
    own = {path: frozenset({path}) for path in parameters}
    return [
        Value(("input", path), of_parameter(path, own) or _NONE, frozenset({path})) for path, _ in with_paths(inputs)
    ]


class Terms:
    """Reads jaxprs and numbers the terms in them. The terms of jaxprs that one object has read can be compared.

    Args:
        stacked: the paths of the parameters whose arrays hold several layers.
    """

    def __init__(self, stacked: Iterable[Path]) -> None:
        self._stacked = frozenset(stacked)
        self._numbers: dict[Hashable, int] = {}
        self._ndims: Mapping[Path, int] = {}

    def of(self, closed: Any, inputs: Sequence[Value], ndims: Mapping[Path, int]) -> list[Value]:
        """Returns the `Value` of each output of a closed jaxpr.

        Args:
            closed: the jaxpr, traced either for stacked arrays or for the arrays of one layer.
            inputs: the `Value` of each of its inputs.
            ndims: the number of dimensions of each parameter in this jaxpr, by path.
        """
        self._ndims = ndims
        return [self._read(value) for value in self._outputs(closed, inputs)]

    def _outputs(self, closed: Any, inputs: Sequence[Value]) -> list[Value]:
        jaxpr, consts = (closed.jaxpr, closed.consts) if hasattr(closed, "consts") else (closed, ())
        known = dict(zip(jaxpr.constvars, map(self._constant, consts), strict=True))
        known |= dict(zip(jaxpr.invars, inputs, strict=True))

        def value_of(atom: Any) -> Value:
            return self._constant(atom.val) if isinstance(atom, jax.extend.core.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            known |= zip(eqn.outvars, self._apply(eqn, [value_of(atom) for atom in eqn.invars]), strict=True)
        return [value_of(atom) for atom in jaxpr.outvars]

    def _apply(self, eqn: Any, args: list[Value]) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        if name in CALLS:
            return self._outputs(called_jaxpr(eqn), args)
        if name == "cond":
            return self._cond(params["branches"], *args)
        sizes = [math.prod(atom.aval.shape) for atom in eqn.invars]
        out = eqn.outvars[0].aval
        if name in _SAME and sizes[0] in (1, math.prod(out.shape)):
            return [args[0]]
        if name == "convert_element_type" and args[0].total:
            return [args[0]]
        if (added := self._added(name, args)) is not None:
            return [added]
        if name in _TOTALS and args[0].apart and args[0].total == _TOTALS[name] and math.prod(out.shape) == 1:
            return [args[0]._replace(apart=False)]
        args = [self._read(value) for value in args]
        if name in _TOTALS and len(params["axes"]) == eqn.invars[0].aval.ndim:
            return [self._total(_TOTALS[name], args[0])]
        if name == "dot_general" and math.prod(out.shape) == 1 and not params["dimension_numbers"][1][0]:
            return [self._total("add", self._joined(("mul", ""), args))]
        settings = str(sorted((key, value) for key, value in params.items() if "sharding" not in key))
        whole = all(size in (1, math.prod(out.shape)) for size in sizes)
        if name == "scatter" and self._is_history(eqn, args[0]):
            return [self._joined(("history",), args)]
        if name in ELEMENTWISE and whole or not any(value.owners for value in args):
            if name == "random_bits":  # shapes do not matter: layers in a list draw other numbers anyway
                return [self._joined((name,), args)._replace(random=True)]
            return [self._joined((name, settings, place), args) for place in range(len(eqn.outvars))]
        return [self._opaque((name, settings, place), args) for place in range(len(eqn.outvars))]

    def _cond(self, branches: Sequence[Any], which: Value, *args: Value) -> list[Value]:
        which = self._read(which)
        found = [[self._read(value) for value in self._outputs(branch, args)] for branch in branches]
        return [self._joined(("cond",), [which, *values]) for values in zip(*found, strict=True)]

    def _added(self, name: str, args: list[Value]) -> Value | None:
        """Returns the combined total if an operation only combines or concatenates totals, otherwise `None`."""
        if name == "concatenate" and args[0].total and all(value.total == args[0].total for value in args):
            return self._sum(args)._replace(apart=True)
        totals = [value for value in args if value.total == ("add" if name == "add_any" else name)]
        zero = [value for value in args if value.term == self._number("literal", "0.0")]
        if not totals or len(totals) + (len(zero) if name == "add" else 0) < len(args):
            return None
        return self._sum(totals)

    def _sum(self, totals: Sequence[Value]) -> Value:
        parts = frozenset(part for value in totals for part in value.term)  # pyright: ignore[reportGeneralTypeIssues]
        apart = any(value.apart for value in totals)
        return self._joined((), totals)._replace(term=parts, total=totals[0].total, apart=apart)

    def _total(self, operation: str, value: Value) -> Value:
        return value._replace(term=frozenset({self._number(operation, value.term)}), total=operation)

    def _read(self, value: Value) -> Value:
        """Converts a total to an ordinary value, for an operation that does not combine totals. Returns other values
        unchanged.

        If the total belongs to a single stacked parameter, the layers of that parameter are treated as one tensor. So
        are the layers of every stacked parameter in a vector of totals that have not been combined.
        """
        if value.total is None:
            return value
        alone = value.owners if len(value.owners) == 1 or value.apart else _NONE
        return value._replace(
            term=self._number("total", value.total, value.term),
            owners=alone,
            as_one=value.as_one | (alone & self._stacked),
            total=None,
            apart=False,
        )

    def _is_history(self, eqn: Any, array: Value) -> bool:
        """Returns whether a scatter sets one entry of a history: an array that stacks several arrays of a parameter's
        shape along a new first dimension, as L-BFGS does."""
        operand, _, update = (atom.aval for atom in eqn.invars)
        ndims = {self._ndims[path] for path in array.owners}
        inserted = eqn.params["dimension_numbers"].inserted_window_dims
        return ndims == {update.ndim} and inserted == (0,) and operand.shape[1:] == update.shape

    def _opaque(self, operation: tuple[Hashable, ...], args: list[Value]) -> Value:
        """Returns the result of an operation that is not elementwise. If its arguments belong to a single stacked
        parameter, the layers of this parameter are treated as one tensor."""
        found = self._joined(operation, args)
        if not found.owners & self._stacked:
            return found
        if len(found.owners) == 1:
            return found._replace(as_one=found.as_one | found.owners)
        return found._replace(term=self._number("of several parameters"))  # counts as a value of the whole tree

    def _joined(self, operation: tuple[Hashable, ...], args: Sequence[Value]) -> Value:
        return Value(
            self._number(*operation, *(value.term for value in args)),
            _NONE.union(*(value.owners for value in args)),
            _NONE.union(*(value.depends for value in args)),
            _NONE.union(*(value.as_one for value in args)),
            any(value.random for value in args),
        )

    def _constant(self, value: Any) -> Value:
        opaque = jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key)
        traced = isinstance(value, Tracer)  # a rate that is injected, for example
        array = value if opaque or traced else np.asarray(value)
        text = str(array) if math.prod(array.shape) <= 64 and not traced else f"array {id(value)}"
        return Value(self._number("literal", text))

    def _number(self, *term: Hashable) -> int:
        return self._numbers.setdefault(term, len(self._numbers))
