"""Gives frozen weights the codes that an import has kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from ..checkpoint import CODES, Checkpoints
from ..formats import QuantizedArray
from ..nn import Frozen, padded_codes


def take_stored_codes(model: nnx.Module, checkpoints: Checkpoints, manifest: Mapping[str, Any]) -> None:
    """Replaces the codes and scales of frozen weights by those of the same format in the `CODES` of a checkpoint. All
    processes must call this.

    Args:
        model: the model, whose weights were frozen on the mesh in scope. It may have adapters.
        checkpoints: the checkpoints that contain the step.
        manifest: the manifest of the step.

    Raises:
        ValueError, OSError: for the same reasons as `Checkpoints.restore`.
    """
    for path, variable in nnx.to_flat_state(nnx.state(model, Frozen)):
        own = tuple(map(str, path))
        value, name = variable.get_raw_value(), "/".join((CODES, *own))
        stored = manifest["static"].get(f"{name}/format")
        if not isinstance(value, QuantizedArray) or stored != repr(value.format):
            continue
        like: Any = value
        for key in reversed((CODES, *own)):
            like = {key: like}
        padded = {(*own, part): layout for part, layout in padded_codes(variable).items()}
        found = checkpoints.restore_part(like, f"{name}/", manifest["step"], padded)
        variable.set_raw_value(jax.tree.unflatten(jax.tree.structure(value), jax.tree.leaves(found)))
