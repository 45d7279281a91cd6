"""Makes gathered weights functions of the shards; backward reduces their gradients to those of the shards.

[Note: second derivatives]
A first derivative never differentiates a gather: the rules of `gathered` and of a chain compute the weight, and reduce
its gradient as the weight's group specifies. A second derivative differentiates these rules themselves. This requires
three properties, none of which costs the first derivative anything:

1. The weight that a rule gathers is a function of the shards. `straight_through` ensures this, whatever is gathered
   instead of the shards (codes, joined or rounded copies): the derivative is that of a gather of the shards, in float32
   at least, as if nothing had been rounded.
2. What a second derivative adds to the gradient of a weight with a slot must arrive in the slot, as that gradient does.
   A product's backward multiplies by the weight's values; `ops.slotted` adds their gradient to that of the slot. A
   forward rule multiplies by the values as ordinary code does (`ops.as_one`): its slot is zeros, whose tangent is zero.
3. The derivative of what a rule sends as integers, or in a format, is that of the values: see `collectives.in_bits` and
   `exchange_gradients`.

Products of rounded operands have no second derivative, and raise an error (`ops.refuse_second_derivative`). So does the
gather of a weight that is multiplied as codes, because no derivative can flow through codes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import SECOND_DERIVATIVE, SlottedWeight, slotted
from ._fused import Shards, gather_weight
from ._group import WeightGroup
from ._reduce import scatter
from ._wire import Kernels, Wire


def straight_through[Name: Hashable](
    shards: Mapping[Name, Any],
    sent: Any,
    make: Callable[[Any], dict[Name, Any]],
    moved: Callable[[Name, Any], jax.Array],
) -> dict[Name, Any]:
    """Returns `make(sent)`, differentiable with respect to the shards; see [Note: second derivatives].

    Args:
        shards: this rank's shards of each trained weight, by name.
        sent: what is gathered. It has no derivative.
        make: a function that gathers `sent` and returns weights, or their codes, by name.
        moved: a function of a weight's name and the tangents of its shards that returns the tangent of the weight.
    """

    @jax.custom_jvp
    def apply(shards: dict[Name, Any], sent: Any) -> dict[Name, Any]:
        del shards
        return make(sent)

    @apply.defjvp
    def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[dict[Name, Any], dict[Name, Any]]:
        weights = apply(*primals)
        moving = {name: moved(name, own) for name, own in tangents[0].items()}
        return weights, {name: moving.get(name, jax.tree.map(_still, own)) for name, own in weights.items()}

    return apply(dict(shards), sent)


def gathered(group: WeightGroup, shards: Shards, wire: Wire | None) -> Any:
    """Returns a fused weight, or its codes, for a layer outside a chain; with a slot (`SlottedWeight`) if
    `WeightGroup.slot` makes one. Backward reduces its gradient to that of the shards.

    Args:
        group: the decisions about the weight.
        shards: this rank's shards, or the parts of them that it stores; empty for a frozen weight.
        wire: what this rank sends, with `()` as its only member; `None` to send the shards themselves.
    """

    def make(shards: Shards, wire: Wire | None) -> Any:
        wire = Kernels(shards) if wire is None else wire
        trained = {} if group.frozen else {(): shards}
        weight = straight_through(
            trained, wire, lambda wire: wire.gather({(): group}), lambda _, own: moved_weight(group, own)
        )[()]
        slot = group.slot(weight)
        return weight if slot is None else SlottedWeight(weight, slot)

    # the rules hold only the group, no module: JAX keeps them, and would keep the arrays of a trace with a module
    @jax.custom_vjp
    def apply(shards: Shards, wire: Wire | None) -> Any:
        return make(shards, wire)

    def fwd(shards: Shards, wire: Wire | None) -> tuple[Any, None]:
        return make(shards, wire), None

    def bwd(residuals: None, gradient: Any) -> tuple[Shards, None]:
        del residuals
        if group.frozen:
            return (), None
        gradient = gradient.slot if isinstance(gradient, SlottedWeight) else gradient
        return scatter({(): group}, {(): gradient})[()], None

    apply.defvjp(fwd, bwd)
    weight: Any = apply(shards, wire)
    return slotted(*weight) if isinstance(weight, SlottedWeight) else weight


def moved_weight(group: WeightGroup, shards: Shards) -> jax.Array:
    """Returns the tangent of a fused weight, given the tangents of its shards.

    Raises:
        TypeError: if the weight is multiplied as codes.
    """
    if group.as_codes:
        raise TypeError(SECOND_DERIVATIVE.format("a product of operands in FP8"))
    weight = gather_weight(shards, group.layouts, jnp.promote_types(group.dtype, jnp.float32)).astype(group.dtype)
    return weight if group.array is None else group.array.from_fused(weight)


def _still(leaf: jax.Array) -> Any:
    """Returns the zero tangent of an array."""
    is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return jnp.zeros_like(leaf) if is_float else np.zeros(leaf.shape, jax.dtypes.float0)
