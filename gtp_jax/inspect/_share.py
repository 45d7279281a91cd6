"""Compares the memory that each device holds between steps with an even share of the whole."""

from __future__ import annotations

import dataclasses
import math

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from .._words import OFFLOADED, Offloaded
from ..hlo import quantity
from ..hook import roles_of
from ..layout import listed, padded_shape
from ..mesh import Roles, axes_of, current_roles
from ..nn import layout_of, partition_of
from ..train import may_leave
from ..variables import even_layout, logical_shape
from ._offload import chip_in_scope
from ._state_memory import StateMemory

# a float32 master weight, and the two moments of AdamW
_WEIGHT, BYTES_OF_MOMENTS = 4, 8
BYTES_OF_STATE = _WEIGHT + BYTES_OF_MOMENTS


@dataclasses.dataclass(frozen=True)
class StateShare:
    """The memory of the trained parameters and of AdamW's state on one device: a float32 weight and two moments per
    element.

    Attributes:
        bytes: what a device stores, padding included.
        even_bytes: what it would store if all devices that share the state stored equal parts of it, without padding.
        degrees: the degrees of the mesh axes that may divide the state, by name; only those above 1.
        large_bytes: the part of `bytes` in arrays that `offload` can keep on the host; 0 if a weight is padded.
    """

    bytes: int
    even_bytes: float
    degrees: dict[str, int]
    large_bytes: int = 0

    def __str__(self) -> str:
        own = f"weights in float32 and two moments take {quantity(self.bytes, 'B')} per device"
        if math.prod(self.degrees.values()) > 1:
            more = self.bytes / self.even_bytes - 1
            own += f"; an even share over {listed(self.degrees)} is {quantity(self.even_bytes, 'B')} ({more:+.1%})"
        if not self.large_bytes:
            return own
        chip, told = chip_in_scope(), []
        for where in OFFLOADED:
            kept = self.memory(where)
            took = quantity(kept.copying_s(chip), "s")
            told.append(f"{quantity(kept.host_bytes, 'B')} with {where!r}, copied in {took} of a step")
        return f"{own}\n`offload` can keep a part of it on the host of an {chip}: {'; '.join(told)}"

    def memory(self, offload: Offloaded | None) -> StateMemory:
        """Returns where the state is with a value of `offload`."""
        if offload is None:
            return StateMemory(self.bytes)
        weights = self.large_bytes * _WEIGHT // BYTES_OF_STATE if offload == "masters" else 0
        host = weights + self.large_bytes * BYTES_OF_MOMENTS // BYTES_OF_STATE
        return StateMemory(self.bytes - host, host, weights)


def share_of(model: nnx.Module) -> StateShare | None:
    """Returns the share of a model's state; `None` if the model has no parameters that are trained.

    Args:
        model: the model, which may be abstract. A parameter without a sharding counts as on the mesh in scope; an
            array on a single device counts as whole.
    """
    variables = [v for _, v in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    own, large, sizes = 0, 0, {}
    for variable in variables:
        mesh, spec = _placed(variable)
        sizes |= mesh
        shape = variable.get_raw_value().shape
        if (even := even_layout(variable)) is not None:  # as a `TrainState` stores it
            shape, spec = padded_shape(shape, even), even.spec
        ranks = math.prod(mesh.get(axis, 1) for axis in axes_of(spec))
        own += math.prod(shape) // ranks
        large += math.prod(shape) // ranks if may_leave(shape) else 0
    if not own:
        return None
    whole = sum(math.prod(logical_shape(v)) for v in variables)
    if any(even_layout(v) is not None or logical_shape(v) != tuple(v.get_raw_value().shape) for v in variables):
        large = 0
    own_layers = next((layout.roles for v in variables if (layout := layout_of(v)) is not None), None)
    roles = own_layers or roles_of(model) or current_roles()
    degrees = {axis: sizes[axis] for axis in _axes(roles) if sizes.get(axis, 1) > 1}
    return StateShare(
        BYTES_OF_STATE * own, BYTES_OF_STATE * whole / math.prod(degrees.values()), degrees, BYTES_OF_STATE * large
    )


def _axes(roles: Roles) -> list[str]:
    """Returns the axes over which state may be divided, each once."""
    named = (*roles.over_optimizer, *roles.weights, *(axis for axis in (roles.tensor, roles.experts) if axis))
    return list(dict.fromkeys(named))


def _placed(variable: nnx.Variable) -> tuple[dict[str, int], PartitionSpec]:
    """Returns the sizes of the axes of a parameter's mesh, and its partition."""
    sharding = getattr(variable.get_raw_value(), "sharding", None)
    if isinstance(sharding, NamedSharding):
        return dict(sharding.mesh.shape), sharding.spec
    if sharding is None:
        return dict(jax.sharding.get_abstract_mesh().shape), partition_of(variable)
    return {}, PartitionSpec()
