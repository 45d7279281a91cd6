"""Compiles a step for the shapes of the batches that it gets."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ... import hlo
from ...train import Phased, TrainState
from ._job import Metrics

# A compiled step: one program, or one for each phase of its recipe.
Program = jax.stages.Compiled | Phased


def compiled(step: Any, *args: Any) -> Program:
    """Compiles what `train_step` returned, with the programs of all phases, so that none is refused when it begins."""
    if isinstance(step, Phased):
        return Phased(step.phases, [one.lower(*args).compile() for one in step.by_phase], step.numbers)
    return step.lower(*args).compile()


class Programs:
    """A step that is compiled once for each structure, shapes and dtypes of a batch.

    Args:
        step: what `train_step` returned.
        say: is told of each program but the first.

    Attributes:
        compile_s: the time that compilation has taken, in seconds.
    """

    def __init__(self, step: Any, say: Callable[[str], None]) -> None:
        self._step, self._say = step, say
        self._programs: dict[Any, Program] = {}
        self.compile_s = 0.0

    def compiled(self, state: TrainState, batch: Any, skip: jax.Array) -> Program:
        """Returns the program for a batch."""
        key = jax.tree.structure(batch), tuple((x.shape, np.dtype(x.dtype)) for x in jax.tree.leaves(batch))
        if key not in self._programs:
            if self._programs:
                self._say("a batch has other shapes than those before: compiling another program")
            began = time.perf_counter()
            self._programs[key] = compiled(self._step, state, batch, skip)
            self.compile_s += time.perf_counter() - began
        return self._programs[key]

    def __call__(self, state: TrainState, batch: Any, skip: jax.Array) -> tuple[TrainState, Metrics]:
        """Runs the step."""
        return self.compiled(state, batch, skip)(state, batch, skip)


def memory_of(programs: Mapping[str, Program], state: TrainState) -> hlo.Memory:
    """Returns the memory of the program that takes the state, in bytes per device; of phases, that of the largest."""
    takes_state = next((program for name, program in programs.items() if name in ("one step", "update")), None)
    if takes_state is None:  # in a process that holds no part of the state
        return hlo.Memory(0, 0, 0, 0, 0, 0)
    if isinstance(takes_state, Phased):
        of_phases = [memory_of({"one step": one}, state) for one in takes_state.by_phase]
        return max(of_phases, key=lambda memory: memory.peak_bytes)
    own: Any = {"params": state.params, "opt_state": state.opt_state}
    if "one step" in programs:
        return hlo.memory(takes_state, **own, frozen=state.frozen)
    # the update of replicas does not take frozen weights, which their own programs do
    return dataclasses.replace(hlo.memory(takes_state, **own), frozen_bytes=hlo.bytes_per_device(state.frozen))
