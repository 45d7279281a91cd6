"""Finds when, in a traced step, each gradient is known."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.extend import core

from ..mesh import Path, with_paths
from ._terms import CALLS, called_jaxpr

# The place of an operation in a trace: its number, and within the operation that it is part of, the number there.
Place = tuple[int, ...]

# Operations that XLA moves or removes, so that they say nothing about when their operand is known. Result n of the
# first ones is operand n with the same first dimension.
_SAME_ROWS = ("convert_element_type", "layout_constraint", "optimization_barrier", "psum", "sharding_constraint")
MOVES = (*_SAME_ROWS, "broadcast_in_dim", "reshape", "slice", "split", "squeeze", "transpose")


class Piece(NamedTuple):
    """A part of a gradient along its first dimension.

    Attributes:
        size: the size of the part.
        at: the place of the operation that computes it.
    """

    size: int
    at: Place


def pieces_of_all(closed: Any, numbers: Any) -> dict[Path, tuple[Piece, ...]]:
    """Returns the pieces of outputs of a trace, by their paths. Scalars have none.

    Args:
        closed: the closed jaxpr of the trace.
        numbers: a pytree of the numbers of the outputs.
    """
    places, outs = _Places(), closed.jaxpr.outvars
    return {path: places.pieces(closed.jaxpr, outs[n]) for path, n in with_paths(numbers) if outs[n].aval.shape}


class _Places:
    """Finds when the values of a trace are known. It reads each jaxpr once."""

    def __init__(self) -> None:
        self._made: dict[int, dict[Any, tuple[int, Any]]] = {}

    def pieces(self, jaxpr: core.Jaxpr, out: Any) -> tuple[Piece, ...]:
        """Returns the pieces from which a value was concatenated, such as the gradients of the layers of a stack; a
        single one if it was not.

        Args:
            jaxpr: the trace.
            out: one of its variables, of at least one dimension.
        """
        number, eqn = self._of(jaxpr, out)
        if eqn is not None:
            own, name = _called(eqn), eqn.primitive.name
            same = len(eqn.invars) == len(eqn.outvars)
            if own is not None:
                within = self.pieces(own, own.outvars[eqn.outvars.index(out)])
                return tuple(Piece(piece.size, (number, *piece.at)) for piece in within)
            if name in _SAME_ROWS and same:
                return self.pieces(jaxpr, eqn.invars[eqn.outvars.index(out)])
            if name == "concatenate" and eqn.params["dimension"] == 0:
                return tuple(Piece(v.aval.shape[0], self._at(jaxpr, v)) for v in eqn.invars)
        return (Piece(out.aval.shape[0], self._at(jaxpr, out)),)

    def _at(self, jaxpr: core.Jaxpr, out: Any) -> Place:
        """Returns the place at which a value is known, apart from moves of its elements; `()` if it is an input."""
        number, eqn = self._of(jaxpr, out)
        if eqn is None:
            return ()
        own, same = _called(eqn), len(eqn.invars) == len(eqn.outvars)
        if own is not None:
            return (number, *self._at(own, own.outvars[eqn.outvars.index(out)]))
        if eqn.primitive.name in MOVES and eqn.invars:
            return self._at(jaxpr, eqn.invars[eqn.outvars.index(out) if same else 0])
        if eqn.primitive.name == "concatenate":
            return max(self._at(jaxpr, v) for v in eqn.invars)
        return (number,)

    def _of(self, jaxpr: core.Jaxpr, out: Any) -> tuple[int, Any]:
        """Returns the number of the equation that computes a variable, and the equation; `None` for an input or a
        literal."""
        made = self._made.get(id(jaxpr))
        if made is None:
            made = {v: (n, eqn) for n, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
            self._made[id(jaxpr)] = made
        return (-1, None) if isinstance(out, core.Literal) else made.get(out, (-1, None))


def _called(eqn: Any) -> core.Jaxpr | None:
    """Returns the jaxpr that an operation calls once, and whose results are its results; `None` for others, such as
    loops."""
    if eqn.primitive.name not in (*CALLS, "shard_map"):
        return None
    inner = called_jaxpr(eqn)
    own = getattr(inner, "jaxpr", inner)
    return own if own is not None and len(own.outvars) == len(eqn.outvars) else None
