"""Decides whether Flax places a variable of an optimizer like the parameter whose metadata it has copied."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec

from ..mesh import axes_of, degrees, legacy_mesh_in_scope
from ._specs import annotation


@legacy_mesh_in_scope()
def place_if_it_fits(variable: nnx.Variable, value: Any) -> Any:
    """Removes the partition from a variable of an `nnx.Optimizer` whose shape it does not fit, such as that of a factor
    of Adafactor. Flax would raise an error; now it leaves the array to JAX. Flax calls this function as the hook
    `on_create_value` of the new variable."""
    if isinstance(variable, nnx.OptState) and not _fits(annotation(variable) or (), getattr(value, "shape", ())):
        variable.set_metadata(out_sharding=None)
    return value


def _fits(spec: Any, shape: tuple[int, ...]) -> bool:
    parts = [degrees(tuple(axes_of(PartitionSpec(entry)))) for entry in spec]
    return len(parts) <= len(shape) and not any(size % part for size, part in zip(shape, parts, strict=False))
