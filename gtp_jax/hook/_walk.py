"""A walk: the units that one call of a model calls, one after the other, and what passes between them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state


class Token(NamedTuple):
    """Two zeros that pass from unit to unit; see [Note: order travels, numbers never do].

    Attributes:
        entered: is available once the unit's input is.
        reduced: carries no order in forward; its cotangent is available once the unit's gradients are reduced.
    """

    entered: jax.Array
    reduced: jax.Array


@dataclasses.dataclass
class _Walk:
    """One call of a model, of one trace.

    Attributes:
        trace: the trace that it began in; units that are called in another one neither take the token nor leave one.
        token: of the last unit called.
    """

    trace: Any
    token: Token | None = None


class Step(NamedTuple):
    """How one call of a unit was tied.

    Attributes:
        unit: the module.
        tied: whether it took a token.
        reason: why it took none.
    """

    unit: Any
    tied: bool
    reason: str


# Set for as long as a call of a model lasts, so that no tracer outlives its trace.
_walk: contextvars.ContextVar[_Walk | None] = contextvars.ContextVar("gtp_jax_walk", default=None)
_steps: contextvars.ContextVar[list[Step] | None] = contextvars.ContextVar("gtp_jax_steps", default=None)


@contextlib.contextmanager
def walking() -> Iterator[None]:
    """Begins a walk, unless one is under way in this trace."""
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
    """Collects how every call of a unit is tied."""
    steps: list[Step] = []
    mark = _steps.set(steps)
    try:
        yield steps
    finally:
        _steps.reset(mark)


def take(unit: Any) -> Token:
    """Returns the token of the unit before; zeros, for which nothing waits, where its order is not known."""
    walk, reason = _walk.get(), ""
    if walk is None:
        reason = "no method of the model is running"
    elif walk.trace != _trace():
        reason = "called inside a transformation (scan, remat, cond, vmap, jit)"
    elif walk.token is None:
        reason = "the first of its call"
    if (steps := _steps.get()) is not None:
        steps.append(Step(unit, not reason, reason))
    if walk is None or walk.token is None or reason:
        return Token(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
    token, walk.token = walk.token, None
    return token


def leave(token: Token) -> None:
    """Leaves a token for the next unit of the walk."""
    if is_under_way():
        _walk.get().token = token  # pyright: ignore[reportOptionalMemberAccess]


def is_under_way() -> bool:
    """Returns whether a walk is under way in this trace."""
    walk = _walk.get()
    return walk is not None and walk.trace == _trace()


def _trace() -> Any:
    return get_opaque_trace_state(convention="nnx")
