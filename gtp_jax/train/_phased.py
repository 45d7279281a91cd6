"""Runs a step whose recipe depends on the number of the step.

[Note: phases] The number of a step is on the device, and reading it waits for the step before. The host therefore
reads it only where it must. After a read, it knows bounds: a step adds one to the number, or zero if it is skipped. As
long as both bounds are in one phase, so is the number.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..recipes import Phases
from ._jit import Jitted
from ._state import TrainState, check_state


class Phased:
    """A function of a state, `(state, ...)`, that is compiled once for the recipe of each phase.

    If the state is traced, as in an outer `jax.jit`, all phases are parts of one program, which chooses by its `step`.

    Args:
        phases: the phases.
        by_phase: the functions of the phases, in order; see `Jitted`.
        numbers: the known numbers of steps, if other functions of the same states share them.
    """

    def __init__(self, phases: Phases, by_phase: Iterable[Any], numbers: Numbers | None = None) -> None:
        self.phases, self.by_phase = phases, tuple(by_phase)
        self.numbers = Numbers(phases) if numbers is None else numbers
        self._checked = False

    def __call__(self, state: TrainState, *args: Any, **kwargs: Any) -> Any:
        check_state(state)
        if isinstance(state.step, jax.core.Tracer):
            starts = jnp.asarray(self.phases.starts[1:], jnp.int32)
            return lax.switch(
                jnp.sum(state.step >= starts),
                [lambda state, args, one=one: one(state, *args, **kwargs) for one in self.by_phase],
                state,
                args,
            )
        step = state.step  # the state may be donated
        low, high = self.numbers.bounds(step)
        run = self.by_phase[self.phases.number(low)]
        if not self._checked:
            # A phase that cannot be traced is refused now, and not when it begins.
            for one in self.by_phase:
                if one is not run and isinstance(one, Jitted):
                    one.eval_shape(state, *args, **kwargs)
        result = run(state, *args, **kwargs)
        self._checked = True
        after = result[0] if isinstance(result, tuple) else None
        if isinstance(after, TrainState):
            self.numbers.remember(after.step, low, high + 1)
        return result

    def lower(self, state: TrainState, *args: Any, **kwargs: Any) -> Any:
        """Returns what `jax.jit(...).lower` returns, for the phase of the state; for the first if the state has no
        values."""
        return self._of(state).lower(state, *args, **kwargs)

    def trace(self, state: TrainState, *args: Any, **kwargs: Any) -> Any:
        """Returns what `jax.jit(...).trace` returns; see `lower`."""
        return self._of(state).trace(state, *args, **kwargs)

    def eval_shape(self, state: TrainState, *args: Any, **kwargs: Any) -> Any:
        """Returns what `jax.jit(...).eval_shape` returns; see `lower`."""
        return self._of(state).eval_shape(state, *args, **kwargs)

    def _of(self, state: TrainState) -> Any:
        check_state(state)
        return self.by_phase[self.phases.number(self.numbers.bounds(state.step)[0])]


class Numbers:
    """What the host knows of the numbers of steps that are on the device.

    Args:
        phases: the phases.
    """

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._known: dict[int, tuple[weakref.ref[jax.Array], int, int]] = {}  # arrays have no hash

    def bounds(self, step: Any) -> tuple[int, int]:
        """Returns two numbers between which the number of a step is, both in one phase. Waits for the step before if it
        must."""
        known, low, high = self._known.get(id(step), (lambda: None, 0, 0))
        if known() is not step or self._phases.number(low) != self._phases.number(high):
            low = high = _value(step)
            self.remember(step, low, high)
        return low, high

    def remember(self, step: Any, low: int, high: int) -> None:
        """Remembers the bounds of an array for as long as it exists."""
        if isinstance(step, jax.Array) and not isinstance(step, jax.core.Tracer):
            key = id(step)
            self._known[key] = weakref.ref(step, lambda _: self._known.pop(key, None)), low, high


def _value(step: Any) -> int:
    """Returns the number of a step; 0 if the state has no values, which the function of a phase refuses."""
    if isinstance(step, jax.core.Tracer | jax.ShapeDtypeStruct) or (isinstance(step, jax.Array) and step.is_deleted()):
        return 0
    return int(np.asarray(step.addressable_data(0) if isinstance(step, jax.Array) else step))
