"""Converts the arrays of a state between their logical shapes and the padded shapes in which they are stored.

An array that the mesh cannot divide evenly is stored with zeros at the end of the divided dimensions (`even_shares`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from ..layout import (
    AnyLayout,
    cut,
    cut_shape,
    pad,
    padded_shape,
    row_blocks_layout,
    row_blocks_shape,
    row_blocks_spec,
)
from ..mesh import Path, of_parameter, with_paths
from ..nn import ModelDef

Tree = Any
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Padded:
    """An array that is stored padded: a parameter, a frozen weight, or an array of a weight that is frozen as codes.

    Attributes:
        layout: the layout of one layer's array.
        shape: the shape of the logical array, including the dimension of layers if it has one.
        stored: the shape of the stored array, including the dimension of layers if it has one.
        spec: the partition of both arrays. It divides the stored array into equal parts, and the logical one into
            unequal parts.
    """

    layout: AnyLayout
    shape: Shape
    stored: Shape
    spec: PartitionSpec

    @property
    def blocks(self) -> Padded:
        """An array with one element per block of this one."""
        shapes = row_blocks_shape(self.shape), row_blocks_shape(self.stored)
        return Padded(row_blocks_layout(self.layout), *shapes, row_blocks_spec(self.stored, self.spec))


@dataclasses.dataclass(frozen=True)
class Paddings:
    """Converts trees between stored and logical arrays.

    The methods take the parameters or the frozen weights, and trees with arrays that belong to parameters, such as an
    optimizer's state (see `of_parameter`). They change only arrays that belong to one of `known`, and whose last
    dimensions have its shape, or one element per block of it (`layout.ROW_BLOCK`). `_on_padding` says which optimizers
    do without this, because XLA may replicate an array from which the padding was removed.

    Attributes:
        known: the padded parameters or frozen weights, with their paths.
    """

    known: tuple[tuple[Path, Padded], ...] = ()

    def cut(self, tree: Tree) -> Tree:
        """Removes the padding: returns a tree with logical arrays, given one with stored arrays."""
        return self._mapped(tree, lambda one: one.stored, cut)

    def pad(self, tree: Tree) -> Tree:
        """Adds the padding, filled with zeros: returns a tree with stored arrays, given one with logical arrays."""
        return self._mapped(tree, lambda one: one.shape, pad)

    def shapes(self, tree: Tree) -> Tree:
        """Returns the shapes and dtypes of the logical arrays, given a tree of stored arrays or of their shapes."""
        return jax.eval_shape(self.cut, tree)

    def with_zeros(self, tree: Tree, which: Sequence[bool]) -> Tree:
        """Sets the padding of some leaves to zero.

        Args:
            tree: a tree of stored arrays.
            which: for each leaf, whether to set its padding to zero. If so, the leaf must belong to a padded parameter.
        """
        known = dict(self.known)

        def one(path: Path, leaf: Any) -> Any:
            owner = of_parameter(path, known)
            assert owner is not None, path
            within = jnp.ones((), jnp.bool_)
            ahead = leaf.ndim - len(owner.shape)
            for dim, (size, more) in enumerate(zip(owner.shape, owner.stored, strict=True), ahead):
                if size != more:
                    within &= lax.broadcasted_iota(jnp.int32, leaf.shape, dim) < size
            return jnp.where(within, leaf, jnp.zeros((), leaf.dtype))

        pairs = zip(with_paths(tree), which, strict=True)
        leaves = [one(path, leaf) if fill else leaf for (path, leaf), fill in pairs]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    def cut_argument(self, value: Any) -> Any:
        """Converts an extra argument of an optimizer's update to logical arrays. Removes the padding from a tree of
        stored arrays; wraps a function of stored parameters in a function of logical parameters."""
        return (lambda params: value(self.pad(params))) if callable(value) else self.cut(value)

    def _mapped(
        self, tree: Tree, before: Callable[[Padded], Shape], convert: Callable[[jax.Array, Any], jax.Array]
    ) -> Tree:
        known = dict(self.known)
        if not known:
            return tree

        def one(path: Path, leaf: Any) -> Any:
            owner = of_parameter(path, known)
            if owner is not None and leaf.shape[leaf.ndim - len(owner.shape) :] != before(owner):
                owner = owner.blocks
            if owner is None or leaf.shape[leaf.ndim - len(owner.shape) :] != before(owner):
                return leaf
            spec = PartitionSpec(*(None,) * (leaf.ndim - len(owner.shape)), *owner.spec)
            converted = convert(leaf, owner.layout)
            traced = isinstance(converted, Tracer) and not jax.sharding.get_abstract_mesh().empty
            return lax.with_sharding_constraint(converted, spec) if traced else converted

        leaves = [one(path, leaf) for path, leaf in with_paths(tree)]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def paddings(model_def: ModelDef, stored: Tree) -> Paddings:
    """Returns how the parameters or frozen weights of a model are padded.

    Args:
        model_def: the definition of the model.
        stored: the parameters, their gradients, the frozen weights, or the shapes of any of these.
    """
    if not model_def.padded:
        return Paddings()
    specs = dict(with_paths(model_def.specs) + with_paths(model_def.frozen_specs))
    known = []
    for path, leaf in with_paths(stored):
        if (layout := model_def.padded.get(path)) is not None:
            shapes = cut_shape(leaf.shape, layout), padded_shape(leaf.shape, layout)
            known.append((path, Padded(layout, *shapes, specs[path])))
    return Paddings(tuple(known))
