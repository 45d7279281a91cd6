"""Splits an optimizer's update into values of whole arrays and values that are computed one block at a time.

[Note: update in blocks] An update of an array in blocks equals the update of the whole array if every operation on the
array is elementwise, and its other operands are scalars. The scalars, such as a step count or the norm of all
gradients, are computed once, from whole arrays.

To decide this, the update is traced for whole arrays and for the blocks, and the operations of both traces are
compared, with calls inlined. A value is a block if it was computed from blocks by elementwise operations whose
constants are the same in both traces: a factor may depend on the shape of its array. All other values are of whole
arrays. `_on_padding` compares traces too, but asks less of an update: where the padding is zero, a sum over an array is
right, although the sum over a block is not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.extend.core
from jax.core import eval_jaxpr

from ..mesh import Path
from ._on_padding import same_constants
from ._terms import CALLS, COPIES, ELEMENTWISE, called_jaxpr

Tree = Any

_EMPTY = jax.make_jaxpr(lambda: ())().jaxpr


class _Constant(NamedTuple):
    """An operand whose value is known when the update is traced."""

    value: Any


class _Op(NamedTuple):
    """An operation of a trace: its equation, and the numbers of its operands and results."""

    eqn: Any
    operands: tuple[int | _Constant, ...]
    results: tuple[int, ...]


@dataclasses.dataclass
class Trace:
    """The operations of a traced function, with calls inlined. Values are numbered in the order in which they are
    computed, inputs first.

    Attributes:
        outputs: the outputs: numbers of values, or constants.
        ops: the operations.
    """

    outputs: list[Any]
    ops: list[_Op]


def traced(function: Callable[..., Tree], *args: Tree) -> Trace:
    """Traces a function for arguments of these shapes and dtypes."""
    closed = jax.make_jaxpr(function)(*args)
    jaxpr = closed.jaxpr
    count, ops = itertools.count(len(jaxpr.invars)), []
    return Trace(_inlined(jaxpr, closed.consts, range(len(jaxpr.invars)), count, ops), ops)


def _inlined(
    jaxpr: Any, constants: Iterable[Any], inputs: Iterable[Any], count: Iterator[int], ops: list[_Op]
) -> list[Any]:
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, map(_Constant, constants), strict=True))
    known |= zip(jaxpr.invars, inputs, strict=True)

    def read(atom: Any) -> Any:
        return _Constant(atom.val) if isinstance(atom, jax.extend.core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        operands = tuple(map(read, eqn.invars))
        if eqn.primitive.name in CALLS:
            inner = called_jaxpr(eqn)
            results = _inlined(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands, count, ops)
        else:
            results = [next(count) for _ in eqn.outvars]
            ops.append(_Op(eqn, operands, tuple(results)))
        known |= zip(eqn.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


_FREE: Path = ()  # the owner of a block that belongs to no parameter, such as a block of zeros


def owners_of_blocks(whole: Trace, in_block: Trace, owners: Mapping[int, Path]) -> dict[int, Path]:
    """Returns the values that can be computed in blocks, with the parameter whose array they are a block of.

    Args:
        whole: the trace for whole arrays.
        in_block: the trace in which the inputs of `owners` have the shapes of blocks.
        owners: the inputs that are given in blocks, by number, with their parameters.

    Raises:
        ValueError: if the two traces have different operations.
    """
    found: dict[int, Path] = dict(owners)
    alike = len(whole.ops) == len(in_block.ops) and all(
        a.eqn.primitive is b.eqn.primitive and a.results == b.results
        for a, b in zip(whole.ops, in_block.ops, strict=True)
    )
    if not alike:
        raise ValueError("the traces have different operations")
    for op, again in zip(whole.ops, in_block.ops, strict=True):
        own = _owner(op, again, found)
        if own is not None:
            found |= dict.fromkeys(op.results, own)
    return found


def _owner(op: _Op, again: _Op, known: Mapping[int, Path]) -> Path | None:
    """Returns the owner of an operation's results if they can be computed in blocks, otherwise `None`."""
    eqn, name = op.eqn, op.eqn.primitive.name
    blocks = {known[n] for n in op.operands if isinstance(n, int) and n in known}
    if not blocks:
        scalar = name == "broadcast_in_dim" and [atom.aval.shape for atom in eqn.invars] == [()]
        return _FREE if scalar else None
    if len(blocks - {_FREE}) > 1 or not (name in ELEMENTWISE or name in COPIES):
        return None
    if str(eqn.params) != str(again.eqn.params):
        return None  # for example, an exponent that is the number of rows
    for a, b, atom in zip(op.operands, again.operands, eqn.invars, strict=True):
        if isinstance(a, _Constant) != isinstance(b, _Constant) or (isinstance(a, int) and a != b):
            return None
        if isinstance(a, _Constant) and isinstance(b, _Constant) and not same_constants(a.value, b.value):
            return None
        if not (isinstance(a, int) and a in known) and atom.aval.shape != ():
            return None
    return next(iter(blocks - {_FREE}), _FREE)


def applied(eqn: Any, operands: Iterable[Any]) -> list[Any]:
    """Applies the operation of an equation to operands of the same forms."""
    pairs = zip(eqn.invars, operands, strict=True)
    given = {v: value for v, value in pairs if not isinstance(v, jax.extend.core.Literal)}
    alone = _EMPTY.replace(invars=list(given), outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects)
    return eval_jaxpr(alone, [], *given.values())


def needed(
    trace: Trace, outputs: Iterable[Any], within: Callable[[int], bool] = lambda _: True, *, effects: bool = False
) -> tuple[list[_Op], list[int]]:
    """Returns the operations that compute some outputs, in order; and the numbers of the values that these read without
    computing them.

    Args:
        trace: the trace.
        outputs: the numbers of the outputs, or constants.
        within: whether to compute a value. By default all values but the inputs are computed.
        effects: whether to include operations with side effects, such as printing, that compute no output.
    """
    wanted = {number for number in outputs if isinstance(number, int)}
    ops: list[_Op] = []
    for op in reversed(trace.ops):
        if (effects and op.eqn.effects) or any(number in wanted and within(number) for number in op.results):
            ops.append(op)
            wanted |= {number for number in op.operands if isinstance(number, int)}
    made = {number for op in ops for number in op.results}
    return ops[::-1], sorted(wanted - made)


def evaluated(ops: Iterable[_Op], known: dict[int, Any], outputs: Iterable[Any]) -> list[Any]:
    """Evaluates operations.

    Args:
        ops: the operations, in order.
        known: the values that they read, by number. The results are added.
        outputs: the numbers of the values to return, or constants.
    """
    for op in ops:
        eqn = op.eqn
        if eqn.effects or not all(number in known for number in op.results):
            given = [n.value if isinstance(n, _Constant) else known[n] for n in op.operands]
            known |= zip(op.results, applied(eqn, given), strict=True)
    return [n.value if isinstance(n, _Constant) else known[n] for n in outputs]
