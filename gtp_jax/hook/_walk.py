"""Tracks walks, and passes tokens along them. A walk is the sequence of calls of units in one trace, within one call of
a model."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

# The reason why a call of a unit takes no token if the model's code makes the call inside a transformation.
INSIDE_TRANSFORMATION = "called inside a transformation (scan, remat, cond, vmap, jit)"


class Token(NamedTuple):
    """Two zeros that one unit leaves and the next takes; see [Note: tokens carry order, never values].

    Attributes:
        entered: a zero that is available once the unit that leaves it has its input and its weights. Its cotangent is
            available once the next unit has its weights and the gradient of its output.
        reduced: a zero that orders nothing in forward. Its cotangent is available once the next unit's gradients are
            reduced.
    """

    entered: jax.Array
    reduced: jax.Array


@dataclasses.dataclass
class _Walk:
    """The state of a walk.

    Attributes:
        trace: the trace in which the walk began. Calls of units in another trace do not belong to the walk.
        token: the token that the last unit left; `None` if there is none, or once a unit has taken it.
    """

    trace: Any
    token: Token | None = None


class Step(NamedTuple):
    """A record of one call in which the hook gathers or quantizes the weights of a unit.

    Attributes:
        unit: the unit.
        tied: whether the call took a token that an earlier call had left.
        reason: why the call took no such token; empty if it took one.
        weights: the path, in the model that was sharded, and the logical shape of each weight that the call gathers or
            quantizes. Within a scan or vmap over stacked weights, the shape is that of a slice.
        multiplied: the paths of the weights that the call multiplies in the recipe's formats.
        narrow: the paths of the weights whose gradients should be summed in float32 or exchanged, but may not be.
    """

    unit: Any
    tied: bool
    reason: str
    weights: tuple[tuple[str, tuple[int, ...]], ...] = ()
    multiplied: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()


# `_walk` is set only while a call of a model runs, so that no tracer outlives its trace.
_walk: contextvars.ContextVar[_Walk | None] = contextvars.ContextVar("gtp_jax_walk", default=None)
_steps: contextvars.ContextVar[list[Step] | None] = contextvars.ContextVar("gtp_jax_steps", default=None)
_record = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def walking() -> Iterator[None]:
    """Returns a context in which the calls of units in this trace form one walk. If a walk is under way in this trace
    already, the calls belong to that walk."""
    here, known = _trace(), _walk.get()
    if known is not None and known.trace == here:
        yield
        return
    mark = _walk.set(_Walk(here))
    try:
        yield
    finally:
        _walk.reset(mark)


@contextlib.contextmanager
def recording() -> Iterator[list[Step]]:
    """Returns a context that records the calls within it in which the hook gathers or quantizes the weights of a unit.
    The value of the context is the list of these records."""
    steps: list[Step] = []
    mark = _steps.set(steps)
    try:
        # The value is part of JAX's cache keys, so JAX uses no trace that it has cached outside of this context.
        with _record(object()):
            yield steps
    finally:
        _steps.reset(mark)


def take(unit: Any) -> Token:
    """Takes the token that the previous unit of the walk left, and returns it. If there is none, or if no walk is under
    way in this trace, returns zeros that are available at once. Adds a record of the call, if calls are recorded."""
    walk, reason = _walk.get(), ""
    if walk is None:
        reason = "no method of the model is running"
    elif walk.trace != _trace():
        reason = INSIDE_TRANSFORMATION
    elif walk.token is None:
        reason = "first in the call of the model"
    if (steps := _steps.get()) is not None:
        steps.append(Step(unit, not reason, reason))
    if walk is None or walk.token is None or reason:
        return Token(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
    token, walk.token = walk.token, None
    return token


def leave(token: Token) -> None:
    """Leaves a token for the next unit of the walk. Does nothing if no walk is under way in this trace."""
    if is_under_way():
        _walk.get().token = token  # pyright: ignore[reportOptionalMemberAccess]


def note_weights(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], multiplied: Iterable[int], narrow: Iterable[int]
) -> None:
    """Adds the weights of a call to the last record, if calls are recorded.

    Args:
        names: the paths of the weights that the call gathers or quantizes.
        shapes: the shapes of these weights, as in `Step.weights`.
        multiplied: the numbers of the weights in `Step.multiplied`.
        narrow: the numbers of the weights in `Step.narrow`.
    """
    if (steps := _steps.get()) is not None:
        paths = {"multiplied": multiplied, "narrow": narrow}
        found = {field: tuple(names[i] for i in sorted(numbers)) for field, numbers in paths.items()}
        steps[-1] = steps[-1]._replace(weights=tuple(zip(names, shapes, strict=True)), **found)


def is_under_way() -> bool:
    """Returns whether a walk is under way in this trace."""
    walk = _walk.get()
    return walk is not None and walk.trace == _trace()


def _trace() -> Any:
    return get_opaque_trace_state(convention="nnx")
