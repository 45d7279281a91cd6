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
    """The memory of a step on one device, in bytes.

    Attributes:
        weights_bytes: the shards of the parameters.
        optimizer_bytes: the rest of the state: moments and counters.
        other_bytes: the other arguments: the batch, and the padding of arguments.
        gradients_bytes: one gradient of the size of a shard per parameter, which is part of the temporary memory.
        activations_bytes: the rest of the temporary memory at its peak: saved activations, gathered weights and
            workspace.
        output_bytes: the results that do not reuse the memory of an argument.
        frozen_bytes: the weights that are not trained, as values or as codes.
        peak_bytes: the sum of all of these, which the program needs.
    """

    weights_bytes: int
    optimizer_bytes: int
    other_bytes: int
    gradients_bytes: int
    activations_bytes: int
    output_bytes: int
    frozen_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))

    def table(self) -> str:
        """Returns a table of the parts and their sum, one per line."""
        rows = [
            ("weights", self.weights_bytes, "shards, as the optimizer holds them"),
            ("optimizer", self.optimizer_bytes, "moments and counters, sharded the same way"),
            *([("frozen", self.frozen_bytes, "weights that are not trained")] if self.frozen_bytes else []),
            ("batch", self.other_bytes, "and other arguments"),
            ("gradients", self.gradients_bytes, "one shard per weight"),
            ("activations", self.activations_bytes, "saved for backward; gathered weights, workspace"),
            ("outputs", self.output_bytes, "that do not reuse the memory of an argument"),
            ("in total", self.peak_bytes, ""),
        ]
        return columns(("memory", "per device", ""), [(n, quantity(b, "B"), note) for n, b, note in rows], right=(1,))


def bytes_per_device(tree: Any) -> int:
    """Returns the number of bytes that the arrays of a pytree take on one device.

    Args:
        tree: a pytree of arrays or `jax.ShapeDtypeStruct`s. A leaf without a sharding counts in full.
    """
    return sum(map(_leaf_bytes, jax.tree.leaves(tree)))


def memory(compiled: jax.stages.Compiled, *, params: Any, opt_state: Any = (), frozen: Any = ()) -> Memory:
    """Returns the memory of a compiled step.

    Args:
        compiled: the compiled step, whose arguments include `params` and `opt_state`.
        params: a pytree of the parameters: arrays or `jax.ShapeDtypeStruct`s with shardings.
        opt_state: the same for the optimizer state.
        frozen: the same for the weights that are not trained.

    Raises:
        ValueError: if the arguments of the step are smaller than that state, which was then not among them.
    """
    stats: Any = compiled.memory_analysis()
    weights, optimizer, constant = (bytes_per_device(tree) for tree in (params, opt_state, frozen))
    other = stats.argument_size_in_bytes - weights - optimizer - constant
    if other < 0:
        raise ValueError(
            f"the step's arguments take {stats.argument_size_in_bytes} bytes per device, but `params`, "
            f"`opt_state` and `frozen` take {weights + optimizer + constant}. Pass the state that the step was lowered "
            "with, with the same shardings."
        )
    gradients = min(weights, stats.temp_size_in_bytes)
    return Memory(
        weights_bytes=weights,
        optimizer_bytes=optimizer,
        other_bytes=other,
        gradients_bytes=gradients,
        activations_bytes=stats.temp_size_in_bytes - gradients,
        output_bytes=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        frozen_bytes=constant,
    )


def _leaf_bytes(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    shape = sharding.shard_shape(leaf.shape) if sharding is not None else leaf.shape
    return math.prod(shape) * np.dtype(leaf.dtype).itemsize
