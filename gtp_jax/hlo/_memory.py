"""Accounts for a training step's memory on one device, from the compiled step and the shapes of its state."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from ..mesh import is_on_host
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
        host_bytes: the parameters and the rest of the state in the memory of the host, which do not count above.
        peak_bytes: the sum of all but `host_bytes`, which the program needs.
    """

    weights_bytes: int
    optimizer_bytes: int
    other_bytes: int
    gradients_bytes: int
    activations_bytes: int
    output_bytes: int
    frozen_bytes: int = 0
    host_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in dataclasses.fields(self)) - self.host_bytes

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
            *([("on its host", self.host_bytes, "of the state, not in the total")] if self.host_bytes else []),
        ]
        return columns(("memory", "per device", ""), [(n, quantity(b, "B"), note) for n, b, note in rows], right=(1,))


def bytes_per_device(tree: Any) -> int:
    """Returns the number of bytes that the arrays of a pytree take for one device, in its own memory or its host's.

    Args:
        tree: a pytree of arrays or `jax.ShapeDtypeStruct`s. A leaf without a sharding counts in full.
    """
    return sum(map(_leaf_bytes, jax.tree.leaves(tree)))


def bytes_on_host(tree: Any) -> int:
    """Returns the part of `bytes_per_device` that is in the memory of the host."""
    return bytes_per_device([leaf for leaf in jax.tree.leaves(tree) if is_on_host(leaf)])


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
    # programs for a CPU count arguments on the host as those on the device
    arguments = stats.argument_size_in_bytes + stats.host_argument_size_in_bytes
    outputs = stats.output_size_in_bytes + stats.host_output_size_in_bytes
    other = arguments - weights - optimizer - constant
    if other < 0:
        raise ValueError(
            f"the step's arguments take {arguments} bytes per device, but `params`, "
            f"`opt_state` and `frozen` take {weights + optimizer + constant}. Pass the state that the step was lowered "
            "with, with the same shardings."
        )
    gradients = min(weights, stats.temp_size_in_bytes)
    away = bytes_on_host(params), bytes_on_host(opt_state)
    return Memory(
        weights_bytes=weights - away[0],
        optimizer_bytes=optimizer - away[1],
        other_bytes=other,
        gradients_bytes=gradients,
        activations_bytes=stats.temp_size_in_bytes - gradients,
        output_bytes=outputs - stats.alias_size_in_bytes - stats.host_alias_size_in_bytes,
        frozen_bytes=constant,
        host_bytes=sum(away),
    )


def _leaf_bytes(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    shape = sharding.shard_shape(leaf.shape) if sharding is not None else leaf.shape
    return math.prod(shape) * np.dtype(leaf.dtype).itemsize
