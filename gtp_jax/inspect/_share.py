"""Compares the memory that each device holds between steps with an even share of the whole."""

from __future__ import annotations

import dataclasses
import math

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ..hlo import quantity
from ..hook import roles_of
from ..layout import listed
from ..mesh import Roles, axes_of, current_roles
from ..nn import layout_of, partition_of
from ..variables import logical_shape

# a float32 master weight and the two moments of AdamW
_BYTES = 12


@dataclasses.dataclass(frozen=True)
class StateShare:
    """The memory of the trained parameters and of AdamW's state on one device: a float32 weight and two moments per
    element.

    Attributes:
        bytes: what a device stores, padding included.
        even_bytes: what it would store if all devices that share the state stored equal parts of it, without padding.
        degrees: the degrees of the mesh axes that may divide the state, by name; only those above 1.
    """

    bytes: int
    even_bytes: float
    degrees: dict[str, int]

    def __str__(self) -> str:
        own = f"weights in float32 and two moments take {quantity(self.bytes, 'B')} per device"
        if math.prod(self.degrees.values()) == 1:
            return own
        more = self.bytes / self.even_bytes - 1
        return f"{own}; an even share over {listed(self.degrees)} is {quantity(self.even_bytes, 'B')} ({more:+.1%})"


def share_of(model: nnx.Module) -> StateShare | None:
    """Returns the share of a model's state; `None` if the model has no parameters that are trained.

    Args:
        model: the model, which may be abstract. A parameter without a sharding counts as on the mesh in scope; an
            array on a single device counts as whole.
    """
    variables = [v for _, v in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    own, sizes = 0, {}
    for variable in variables:
        mesh, spec = _placed(variable)
        sizes |= mesh
        ranks = math.prod(mesh.get(axis, 1) for axis in axes_of(spec))
        own += math.prod(variable.get_raw_value().shape) // ranks
    if not own:
        return None
    whole = sum(math.prod(logical_shape(v)) for v in variables)
    own_layers = next((layout.roles for v in variables if (layout := layout_of(v)) is not None), None)
    roles = own_layers or roles_of(model) or current_roles()
    degrees = {axis: sizes[axis] for axis in _axes(roles) if sizes.get(axis, 1) > 1}
    return StateShare(_BYTES * own, _BYTES * whole / math.prod(degrees.values()), degrees)


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
