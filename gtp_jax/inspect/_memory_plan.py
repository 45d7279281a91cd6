"""Plans with which options the state of a model fits into the memory of GPUs. Needs only shapes, and no devices."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from .. import hlo
from .._words import OFFLOADED, Moments
from ..hlo import columns, quantity
from ..layout import even_shares
from ..mesh import TP, use_roles
from ..models import ModelConfig, build
from ..nn import abstract_model, split_model
from ..runner.flags import Parallelism
from ._share import BYTES_OF_MOMENTS, BYTES_OF_STATE, StateShare, share_of
from ._state_memory import StateMemory

# What JAX may allocate of a GPU's memory, as a share, and its default.
_FRACTION, _DEFAULT_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75

_WIDE = 4  # the bytes of a float32

# The bytes of two moments of an element; in FP8, 16 elements share a scale of one byte.
_MOMENTS: Mapping[Moments, float] = {"bfloat16": 2 * 2, "float8": 2 * 17 / 16}


@dataclasses.dataclass(frozen=True)
class Choice:
    """The memory that a state takes with some options, in bytes per device.

    Attributes:
        options: the options, in words.
        between: where the state is between steps.
        step_bytes: what a step needs at least on the device: the state there, gradients, and the weights that it
            computes with, unless it gathers them layer by layer.
    """

    options: str
    between: StateMemory
    step_bytes: int


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The memory that training a model with AdamW takes. Prints as a table.

    Attributes:
        machine: the GPUs.
        degrees: the sizes of the mesh axes.
        choices: what the state takes, by options.
        padded: the name of a weight that is stored padded, so that nothing can be kept on the host; empty if none is.
        limit_bytes: what JAX may allocate on a device.
    """

    machine: hlo.Target
    degrees: dict[str, int]
    choices: tuple[Choice, ...]
    padded: str
    limit_bytes: int

    def __str__(self) -> str:
        chip = self.machine.chip
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.degrees.items())
        memory = hlo.fact(chip, "memory").value
        rows = [
            (
                one.options,
                quantity(one.between.device_bytes, "B"),
                quantity(one.between.host_bytes, "B"),
                quantity(one.step_bytes, "B"),
                self._verdict(one),
                quantity(one.between.copying_s(chip), "s") if one.between.host_bytes else "",
            )
            for one in self.choices
        ]
        header = ("options", "on the device", "on its host", "in a step", "fits", "copies take")
        refused = (
            f"\n--offload is refused, because these degrees do not divide {self.padded}, which is stored padded"
            if self.padded
            else ""
        )
        return (
            f"memory of {mesh}: JAX may allocate {quantity(self.limit_bytes, 'B')} of the {quantity(memory, 'B')} of a "
            f"device, as {_FRACTION} says ({_fraction():g})\n\n"
            f"{columns(header, rows, right=(1, 2, 3, 5))}\n\n"
            "per device, of weights in float32 and AdamW's moments; in a step at least, with gradients and weights to "
            "compute with.\nNot included are activations, gathered weights and workspace: `gtp-jax inspect` compiles a "
            "step and counts them."
            f"{refused}"
        )

    def _verdict(self, choice: Choice) -> str:
        left = self.limit_bytes - choice.step_bytes  # for activations
        if left >= 0:
            return f"{quantity(left, 'B')} are left"
        devices = self.machine.devices
        return f"no: on {-(-choice.step_bytes * devices // self.limit_bytes)} GPUs or more"


def plan_memory(config: ModelConfig, machine: hlo.Target, parallelism: Parallelism) -> MemoryPlan:
    """Plans what fits, from shapes alone."""
    degrees = parallelism.degrees(machine.devices)
    mesh = AbstractMesh(tuple(degrees.values()), tuple(degrees), axis_types=(AxisType.Auto,) * len(degrees))
    with jax.sharding.use_abstract_mesh(mesh), use_roles(parallelism.roles), even_shares():
        model = abstract_model(lambda rngs: build(config, rngs=rngs))
        share, model_def = share_of(model), split_model(model)[0]
    assert share is not None
    gathers = any(size > 1 for axis, size in degrees.items() if axis != TP)
    return MemoryPlan(
        machine=machine,
        degrees=degrees,
        choices=_choices(share, itemsize=np.dtype(config.dtype).itemsize, gathers=gathers),
        padded=".".join(next(iter(model_def.padded), ())),
        limit_bytes=limit_bytes(machine),
    )


def limit_bytes(machine: hlo.Target) -> int:
    """Returns what JAX may allocate on a device.

    Raises:
        ValueError: if the environment gives a share that is no number above 0.
    """
    return int(_fraction() * hlo.fact(machine.chip, "memory").value)


def _choices(share: StateShare, *, itemsize: int, gathers: bool) -> tuple[Choice, ...]:
    """Returns what a state takes, by options.

    Args:
        share: the state with all arrays on the device.
        itemsize: the bytes of an element that the model computes with.
        gathers: whether weights are communicated. Their gradients are then summed in float32; otherwise they are in
            the dtype of computation, and so is a copy of all weights.
    """
    elements = share.bytes // BYTES_OF_STATE
    copy = itemsize * elements if itemsize < _WIDE else 0
    found = [
        ("none", share.memory(None)),
        *(
            (f"--optimizer-state {name}", StateMemory(share.bytes - BYTES_OF_MOMENTS * elements + int(size * elements)))
            for name, size in _MOMENTS.items()
        ),
        *((f"--offload {where}", share.memory(where)) for where in OFFLOADED if share.large_bytes),
    ]
    choices = []
    for options, between in found:
        gradients = (_WIDE if gathers else itemsize) * elements
        weights = itemsize * elements if between.copied_bytes else 0 if gathers else copy
        choices.append(Choice(options, between, between.device_bytes + gradients + weights))
    return tuple(choices)


def _fraction() -> float:
    """Returns the share of a device's memory that JAX may allocate.

    Raises:
        ValueError: if the environment does not give a number above 0.
    """
    text = os.environ.get(_FRACTION, "")
    try:
        share = float(text) if text else _DEFAULT_FRACTION
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise ValueError(f"{_FRACTION} is {text!r} in the environment; it must be a number above 0, such as 0.9.")
    return share
