"""Accounts for a training step's memory on one device, from the compiled step and the shapes of its state."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from ._text import columns, quantity


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        weights_bytes: the shards of the parameters.
        optimizer_bytes: the rest of the state: moments, counters.
        other_bytes: what else is passed in: the batch, padding of the arguments.
        gradients_bytes: one shard-sized gradient a parameter, a part of the temporary memory.
        activations_bytes: the rest of the temporary memory at its peak: saved activations, gathered weights,
            workspace.
        output_bytes: results that reuse no argument's memory.
        peak_bytes: the sum of all, which is what the program needs.
    """

    weights_bytes: int
    optimizer_bytes: int
    other_bytes: int
    gradients_bytes: int
    activations_bytes: int
    output_bytes: int

    @property
    def peak_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))

    def table(self) -> str:
        """Returns the parts and their sum, a line each."""
        rows = [
            ("weights", self.weights_bytes, "shards, as the optimizer holds them"),
            ("optimizer", self.optimizer_bytes, "moments and counters, sharded alike"),
            ("batch", self.other_bytes, "and other arguments"),
            ("gradients", self.gradients_bytes, "one shard a weight"),
            ("activations", self.activations_bytes, "saved for backward; gathered weights, workspace"),
            ("outputs", self.output_bytes, "that reuse no argument's memory"),
            ("in all", self.peak_bytes, ""),
        ]
        return columns(("memory", "a device", ""), [(n, quantity(b, "B"), note) for n, b, note in rows], right=(1,))


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes that the arrays of a pytree take on one device.

    Args:
        tree: pytree of arrays or `jax.ShapeDtypeStruct`s; a leaf without a sharding is counted whole.
    """
    return sum(map(_leaf_bytes, jax.tree.leaves(tree)))


def memory(compiled: jax.stages.Compiled, *, params: Any, opt_state: Any = ()) -> Memory:
    """Returns the memory of a compiled step.

    Args:
        compiled: the step, with `params` and `opt_state` among its arguments.
        params: pytree of the parameters: arrays or `jax.ShapeDtypeStruct`s with shardings.
        opt_state: the same of the optimizer's state.

    Raises:
        ValueError: if the step was compiled without any of that state, so that its arguments are smaller.
    """
    stats: Any = compiled.memory_analysis()
    weights, optimizer = bytes_per_device(params), bytes_per_device(opt_state)
    other = stats.argument_size_in_bytes - weights - optimizer
    if other < 0:
        raise ValueError(
            f"the step's arguments take {stats.argument_size_in_bytes} bytes a device, but `params` and `opt_state` "
            f"{weights + optimizer}. Pass the state that the step was lowered with, with the same shardings."
        )
    gradients = min(weights, stats.temp_size_in_bytes)
    return Memory(
        weights_bytes=weights,
        optimizer_bytes=optimizer,
        other_bytes=other,
        gradients_bytes=gradients,
        activations_bytes=stats.temp_size_in_bytes - gradients,
        output_bytes=stats.output_size_in_bytes - stats.alias_size_in_bytes,
    )


def _leaf_bytes(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    shape = sharding.shard_shape(leaf.shape) if sharding is not None else leaf.shape
    return math.prod(shape) * np.dtype(leaf.dtype).itemsize
