"""Splits a `Stack` into its layers, for programs that use the same weights many times and take no gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..mesh import current_view
from ..variables import Leaf, is_variable, split_nodes
from ..weights import Gathered, Kernels, in_view
from ._layer import Layer, partition_of
from ._owners import weight_owners
from ._weight import Named, StackedLayers, Weight


class Unstacked(Layer):
    """The layers of a `Stack`, each with its own variables, called in sequence.

    Args:
        layers: the layers, in order.
        each: for each layer, the arguments that only its call receives; empty if there are none.
    """

    context_parallel = True

    def __init__(self, layers: list[nnx.Module], each: Sequence[Named]) -> None:
        super().__init__()
        self.layers = nnx.List(layers)
        self.each = tuple(each) or ((),) * len(layers)

    def __call__(self, x: Any, *shared: Any, **named: Any) -> Any:
        for layer, own in zip(self.layers, self.each, strict=True):
            x = layer(x, *shared, **named, **dict(own))  # pyright: ignore[reportCallIssue]
        return x

    def local(self, x: Any, *shared: Any, **named: Any) -> Any:
        return self(x, *shared, **named)


def with_gathered_weights(model: nnx.Module) -> nnx.Module:
    """Returns the model with its weights in the form in which layers multiply by them: stacks are split into their
    layers, and each weight is gathered, cast and fused with the other kernels of its module. Call this in a traced
    program that takes no gradients.

    Args:
        model: the model. It is changed in place; if it is itself a `Stack`, it is left unchanged, and the result is a
            new module. It may not contain weights that are stored as codes.
    """
    for path, module in list(nnx.iter_modules(model)):
        if isinstance(module, StackedLayers):
            apart = Unstacked([_layer(module, i) for i in range(module.length)], module.each)
            if not path:
                model = apart
                break
            *ahead, last = path
            parent: Any = model
            for key in ahead:
                parent = _child(parent, key)
            if isinstance(last, int) or isinstance(parent, nnx.Dict):
                parent[last] = apart
            else:
                setattr(parent, str(last), apart)
    for owner in weight_owners(model).values():
        first, *others = owner.weights()
        first.set_raw_value(_gathered(owner))
        for variable in others:
            variable.set_raw_value(None)
    return model


def _child(node: Any, key: Any) -> Any:
    return node[key] if isinstance(key, int) or isinstance(node, nnx.Dict) else getattr(node, key)


def _layer(stack: Any, index: int) -> nnx.Module:
    """Returns one layer of a stack."""
    template, leaves = split_nodes(stack.layers)

    def of_layer(leaf: Leaf) -> Leaf:
        if not is_variable(leaf):
            return leaf[index]
        sharding = leaf.get_metadata().get("out_sharding")
        metadata = {"out_sharding": tuple(sharding)[1:]} if sharding else {}
        one = leaf.replace(jax.tree.map(lambda array: array[index], leaf.get_raw_value()), **metadata)
        if current_view() == "global" and not jnp.issubdtype(one.get_raw_value().dtype, jax.dtypes.prng_key):
            one = one.replace(lax.with_sharding_constraint(one.get_raw_value(), partition_of(one)))
        return one

    return template.merged(list(map(of_layer, leaves)))


def _gathered(owner: Weight) -> Gathered:
    groups = {(): owner.built_group}
    gather = in_view(lambda wire: wire.gather(groups)[()], lambda wire: (wire.specs(groups),))
    return Gathered(gather(Kernels(owner.stored())), groups[()])
