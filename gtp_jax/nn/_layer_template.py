"""Takes a layer of a chain apart, and builds it again with the values of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from ..chain import is_float, joined, separated
from ..variables import Leaf, Template, is_variable, split_nodes, with_raw_value
from ..weights import ModulePath, refuse_gradient
from ._frozen import Frozen
from ._layer import layout_of, value_of
from ._owners import kernel_places
from ._weight import Weight


class Arrays(NamedTuple):
    """The arrays of a layer's variables that are not gathered.

    Attributes:
        params: the floating-point arrays, except frozen ones. They are differentiated.
        constants: the others: integers, keys and frozen arrays.
    """

    params: list[Any]
    constants: list[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class LayerTemplate:
    """The modules of one layer without their values. It holds no arrays, because JAX keeps the functions of a chain
    after its trace has ended.

    Attributes:
        name: the name of the layer's class.
        modules: the modules without their leaves.
        leaves: the variables without values, and `None` for each array that is a plain attribute.
        places: for each owner of weights, by path, the indices of its variables among the leaves.
        gathered: the indices of the variables that hold gathered weights in a call.
        others: the structure of the values of all other leaves.
        trained: for each array in these values, whether it is among the `params`.
    """

    name: str
    modules: Template
    leaves: Sequence[Leaf]
    places: Mapping[Any, tuple[int, ...]]
    gathered: frozenset[int]
    others: Any
    trained: Sequence[bool]

    def merged(self, arrays: Arrays, weights: Mapping[int, Any]) -> Any:
        """Returns the layer with the given values in its variables.

        Args:
            arrays: the arrays that are not gathered.
            weights: the values of the weights' variables, by index among the leaves.
        """
        values = iter(jax.tree.unflatten(self.others, joined(*arrays, self.trained)))
        put = [weights.get(i) if i in self.gathered else next(values) for i in range(len(self.leaves))]
        return self.modules.merged([with_raw_value(v, value) for v, value in zip(self.leaves, put, strict=True)])


def layer_taken_apart(
    layer: nnx.Module, owners: Mapping[ModulePath, Weight], stacked: bool
) -> tuple[LayerTemplate, Arrays]:
    """Returns the template of a layer, and those of its arrays that are not gathered.

    Args:
        layer: the layer; or, if `stacked`, the layers of a stack, whose variables are stacked. Their template is that
            of one layer.
        owners: the owners of its weights, by path.
        stacked: whether the variables are stacked.
    """
    modules, leaves = split_nodes(layer)
    gathered = frozenset(i for i, v in enumerate(leaves) if layout_of(v) is not None)
    rest = [v for i, v in enumerate(leaves) if i not in gathered]
    values = [refuse_gradient(value_of(v)) if isinstance(v, Frozen) else value_of(v) for v in rest]
    arrays, others = jax.tree.flatten(values)
    own = [not isinstance(v, Frozen) for v in rest for _ in jax.tree.leaves(value_of(v))]
    trained = [one and is_float(a) for a, one in zip(arrays, own, strict=True)]
    bare = [v.replace(None, **(_of_one_layer(v) if stacked else {})) if is_variable(v) else None for v in leaves]
    template = LayerTemplate(
        type(layer).__name__, modules, bare, kernel_places(owners, leaves), gathered, others, trained
    )
    return template, Arrays(*separated(arrays, trained))


def _of_one_layer(variable: nnx.Variable) -> dict[str, Any]:
    """Returns the metadata in which one layer's variable differs from the stacked variable."""
    sharding = variable.get_metadata().get("out_sharding")
    return {"out_sharding": tuple(sharding)[1:]} if sharding else {}
