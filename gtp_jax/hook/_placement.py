"""Where the weight of a variable lives: its placement, which `shard` puts into the variable's metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from .. import layout
from ..mesh import current_view
from ..variables import padded_by_state
from ._path import path_of


@dataclasses.dataclass(frozen=True)
class Placement(layout.Placement):
    """How a weight that `shard` has sharded is partitioned.

    Attributes:
        kind: the class of the weight's variable. A variable of another class with this placement in its metadata, such
            as an adapter, has only copied it, and does not count as sharded.
    """

    kind: type[nnx.Variable] = nnx.Param

    def check_mesh(self, owner: str) -> None:
        """Checks that the mesh in scope has the axes that shard the weight, with the sizes that they had when the
        weight was sharded.

        Args:
            owner: what was sharded, as the message names it: a weight and its module, or "the model".

        Raises:
            ValueError: if such an axis is missing or has another size.
        """
        found = dict(jax.sharding.get_abstract_mesh().shape)
        if any(found.get(axis) != size for axis, size in self.degrees):
            want = " x ".join(f"{axis} {size}" for axis, size in self.degrees)
            have = " x ".join(f"{axis} {size}" for axis, size in found.items())
            raise ValueError(
                f"{owner} was sharded by `gtp_jax.shard` over {want}, and "
                f"{f'the mesh in scope is {have}' if have else 'no mesh is in scope'}. Use the model under `with "
                "jax.set_mesh(mesh):`, with the mesh for which it was sharded. To use another mesh, build a new "
                "model, shard it under that mesh, and restore its weights from a checkpoint."
            )

    def of_slice(self, shape: tuple[int, ...], owner: str = "a weight") -> Placement:
        """Returns the placement of an array of this shape: the whole array, or a slice without the first dimension, as
        inside a scan or a vmap over stacked weights.

        Args:
            shape: the shape of the array.
            owner: how the message names the weight.

        Raises:
            ValueError: if the shape has neither as many dimensions as the weight nor one fewer, or if it has one fewer
                and the weight's first dimension is sharded.
        """
        if len(shape) == self.ndim:
            return self
        if len(shape) != self.ndim - 1 or self.axes(0):
            raise ValueError(
                f"{owner} has {self.ndim} dimensions, and `gtp_jax.shard` stores it as {self.stored}, but its variable "
                f"holds an array of shape {shape}. At most one scan or vmap may run over a weight, over its first "
                "dimension, and only if this dimension is not sharded; if it is, name another partition with `specs`. "
                "If the weight is to have another shape, build the model again with that shape, and shard the new "
                "model."
            )
        return self.without_first

    def check_padding(self, shape: Sequence[int], owner: str, *, of_shard: bool) -> None:
        """Checks the size of the padded dimension of an array, if there is one. It must be the size with which the
        weight was stored, because a gather cuts this dimension to its logical size.

        Args:
            shape: the shape of the array.
            owner: how the message names the weight or slice.
            of_shard: whether the array is a shard.

        Raises:
            ValueError: if the array has another size in the padded dimension.
        """
        dim = self.padding.dim
        if dim is not None and shape[dim] * (self.parts(dim) if of_shard else 1) != self.array_shape[dim]:
            raise ValueError(
                f"{owner} has the shape {self.shape}, and `gtp_jax.shard` stores it padded to {self.array_shape}, but "
                f"its variable holds {'a shard' if of_shard else 'an array'} of shape {tuple(shape)}. "
                f"{'Pass arrays into `shard_map` in the partitions in which they are stored. ' if of_shard else ''}"
                "Outside of `shard_map`, set an array of the weight's logical shape, which is the same on every mesh: "
                "`kernel.set_value(array)` pads it. If the weight is to have another shape, build the model again with "
                "that shape, and shard the new model."
            )


def refuse_padded(variable: nnx.Variable) -> None:
    """Raises an error if the variable of a weight that is not padded holds the padded array that a `TrainState` stores
    of it, which the model's code would take for a longer weight.

    Raises:
        ValueError: if it does; the message names the weight, both shapes and the remedy.
    """
    placement, shape = variable.get_metadata().get("placement"), getattr(variable.get_raw_value(), "shape", None)
    if placement is None or placement.even is None or shape is None or current_view() == "local":
        return
    stored = placement.even.array_shape
    if tuple(shape) == stored or (len(stored) > 1 and tuple(shape) == stored[1:] != placement.shape[1:]):
        raise padded_by_state(f"the weight {'.'.join(path_of(variable))} of shape {placement.shape}", tuple(shape))


def placement_of(variable: Any) -> Placement | None:
    """Returns the placement of the array that a variable holds, which may be a slice of the stored weight. Returns
    `None` for a variable without a placement, for one that has only copied a placement (`Placement.kind`), and for
    anything that is not a variable.

    In local view, a weight is gathered over all its axes, tensor axes included: a stock layer's code does not sum over
    tensor ranks, so each rank must compute with the whole weight.

    Raises:
        ValueError: for the same reasons as `refuse_padded`, `Placement.of_slice`, `Placement.check_padding` and
            `current_view`.
    """
    placement = variable.get_metadata().get("placement") if isinstance(variable, nnx.Variable) else None
    if placement is None or type(variable) is not placement.kind:
        return None
    in_global = current_view() == "global"
    placement = placement if in_global else dataclasses.replace(placement, used=PartitionSpec())
    shape = getattr(variable.get_raw_value(), "shape", None)
    if shape is None:
        return placement
    owner = f"the weight {'.'.join(path_of(variable))}"
    refuse_padded(variable)
    found = placement.of_slice(shape, owner)
    owner = owner if found is placement else f"a slice of {owner}"
    found.check_padding(shape, owner, of_shard=current_view() == "local")
    return found
