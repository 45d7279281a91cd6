"""Tracks walks, and records calls. A walk is the sequence of calls of units in one trace, in one call of a model."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import get_opaque_trace_state

# Reasons why the weights of a call are not gathered while another call computes.
FIRST = "first in the call of the model"
NO_WALK = "no method of the model is running, or not in traced code"
NOT_STAGED = "the model has side effects between calls of blocks, or a call computes weights of a later one"
INSIDE_TRANSFORMATION = "called inside a transformation (scan, remat, cond, vmap, jit)"


class Step(NamedTuple):
    """A record of one call in which the hook gathers or quantizes the weights of a unit.

    Attributes:
        unit: the unit.
        tied: whether its weights are gathered while the call before it computes.
        reason: why they are not; empty if they are.
        weights: the path, in the model that was sharded, and the logical shape of each weight that the call gathers or
            quantizes. Within a scan or vmap over stacked weights, the shape is that of a slice.
        multiplied: the paths of the weights that the call multiplies in the recipe's formats.
        narrow: the paths of the weights whose gradients should be summed in float32 or exchanged, but may not be.
    """

    unit: Any
    tied: bool = False
    reason: str = ""
    weights: tuple[tuple[str, tuple[int, ...]], ...] = ()
    multiplied: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()


# `_walk`, the trace of a walk, is set only while a call of a model runs, so that no tracer outlives its trace.
_walk: contextvars.ContextVar[Any] = contextvars.ContextVar("gtp_jax_walk", default=None)
_steps: contextvars.ContextVar[list[Step] | None] = contextvars.ContextVar("gtp_jax_steps", default=None)
_record = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def walking() -> Iterator[None]:
    """Returns a context in which the calls of units in this trace form one walk. If a walk is under way in this trace
    already, the calls belong to that walk."""
    if is_under_way():
        yield
        return
    mark = _walk.set(_trace())
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


def note(unit: Any) -> Callable[..., None] | None:
    """Adds a record of a call, and returns a function that sets attributes of the record; `None` if calls are not
    recorded."""
    steps = _steps.get()
    if steps is None:
        return None
    place = len(steps)
    steps.append(Step(unit))

    def replace(**attributes: Any) -> None:
        steps[place] = steps[place]._replace(**attributes)

    return replace


def reason_alone() -> str:
    """Returns why a call in this trace, which no recording marks, does not belong to a chain."""
    return NO_WALK if _walk.get() is None or is_under_way() else INSIDE_TRANSFORMATION


def is_under_way() -> bool:
    """Returns whether a walk is under way in this trace."""
    walk = _walk.get()
    return walk is not None and walk == _trace()


def _trace() -> Any:
    return get_opaque_trace_state(convention="nnx")
