"""Quantizes weights that travel as a recipe's codes, and gathers the codes.

[Note: seen as a matrix]
A weight of any number of dimensions is seen as a matrix `(features in, features out)`, like the kernel of a dense
layer. Blocks of one row run along the features in. `features_in` decides which dimensions are joined to the features
in; the others are joined to the features out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from ..formats import Format, Operands, QuantizedArray, Tiled, WireFormat
from ..layout import UNDIVIDED, Division, Layout, Split
from ..mesh import current_view, degrees
from ..ops import dequantize, linear_blocks, linear_fp8, linear_fp8_blocks
from ..recipes import Recipe, matches
from ..weights import CallKeys, ModulePath, Shards, WeightGroup, Wire, cut, in_view, quantize_together
from ._movement import form_in_use
from ._path import paths_of
from ._placement import Placement, features_in, placement_of
from ._products import Array, Factor, Runs
from ._scope import recipe_in_scope


@dataclasses.dataclass(frozen=True)
class Coded:
    """A weight that travels in a format.

    Attributes:
        form: the format.
        operands: the formats in which it is multiplied; `None` if it is multiplied in the model's compute dtype.
        inputs: the number of leading dimensions that are joined into the features in; see [Note: seen as a matrix].
        layout: the layout of the matrix `(features in, features out)`. Its rows are the features out, or the dimension
            that ranks divide if the choice does not change the codes.
    """

    form: WireFormat
    operands: Operands | None
    inputs: int
    layout: Layout

    def group(self, dtype: np.dtype, stored: np.dtype) -> WeightGroup:
        """Returns the weight's group, which holds the decisions about it. In a format of the user's own, which may make
        its arrays for one dtype, the weight is gathered in the dtype in which it is stored.

        Args:
            dtype: the dtype in which it is used.
            stored: the dtype in which it is stored.
        """
        return WeightGroup(
            layouts=(self.layout,),
            param_dtypes=(stored,),
            dtype=dtype if isinstance(self.form, Format | Tiled) else stored,
            grad_reduce="float32",  # the hook reduces gradients itself
            codes_multiply=isinstance(self.form, Tiled),
            wire=self.form,
            operands=self.operands,
        )

    def to_matrix(self, array: jax.Array) -> jax.Array:
        """Returns an array, or a shard of it, reshaped to the matrix, or to a shard of the matrix."""
        return jnp.reshape(array, (math.prod(array.shape[: self.inputs]), math.prod(array.shape[self.inputs :])))

    @property
    def used(self) -> PartitionSpec:
        """The partition of the gathered matrix in global view."""
        split = self.layout.split
        entries = [split.axis if split is not None and dim == self.layout.split_dim else None for dim in range(2)]
        return PartitionSpec(*entries)


def coded(variable: nnx.Variable, placement: Placement) -> Coded | None:
    """Returns how a sharded weight travels under the recipe in scope; `None` if it is not quantized.

    Raises:
        ValueError: for the same reasons as `decide`.
    """
    recipe, value = recipe_in_scope(), variable.get_raw_value()
    if recipe is None or not hasattr(value, "shape"):
        return None
    decided = decide(recipe, paths_of(variable), _logical_shape(value, placement), placement)
    return decided if isinstance(decided, Coded) else None


def moving(variable: Any) -> Placement | None:
    """Returns the placement of a weight that must be gathered or quantized before use; `None` for anything else."""
    placement = placement_of(variable)
    if placement is None or placement.gathered or coded(variable, placement) is not None:
        return placement
    return None


def decide(
    recipe: Recipe, paths: Sequence[tuple[str, ...]], shape: tuple[int, ...], placement: Placement
) -> Coded | str:
    """Returns how a sharded weight travels under a recipe; if it is not quantized, the reason in words, which is empty
    if no pattern excludes it.

    Args:
        recipe: the recipe.
        paths: the weight's paths in the model; a pattern that matches any of them applies.
        shape: its logical shape.
        placement: its placement, for an array of this shape.

    Raises:
        ValueError: if the recipe asks for something that only gtp_jax's own layers support.
    """
    rules = (rule for rule in recipe.rules if any(matches(rule[0], path) for path in paths))
    pattern, chosen = next(rules, (None, recipe))
    _check_supported(recipe, chosen, paths[0])
    if chosen.wire is None:
        return "" if pattern is None else f"it matches {pattern!r}"
    found = _seen_as_matrix(shape, placement)
    if isinstance(found, str):
        return found
    inputs, layout = found
    if not isinstance(chosen.wire, Format | Tiled):
        return Coded(chosen.wire, None, inputs, layout)
    form = chosen.wire.format if isinstance(chosen.wire, Tiled) else chosen.wire
    if reason := _cut(layout, form, tiled=isinstance(chosen.wire, Tiled)):
        return reason
    return Coded(chosen.wire, chosen.operands, inputs, _in_order(layout, form))


def _check_supported(recipe: Recipe, chosen: Recipe, path: Sequence[str]) -> None:
    """Raises an error if a recipe asks for more than quantized weights and matmuls."""
    asked, instead, operands = "", "", chosen.operands
    if recipe.high_precision_first or recipe.high_precision_last:
        asked = "`high_precision_first` and `high_precision_last`, which count the layers of a `Stack`"
        instead = "Name blocks in `exclude`, such as ('layers.0',)"
    elif operands is not None and operands.delayed is not None:
        asked = f"`{type(chosen).__name__}`, whose amaxes of earlier steps are kept for gtp_jax's own layers alone"
        instead = "Pass `gtp_jax.FP8(matmuls=True)`"
    elif operands is not None and operands.weight not in (chosen.wire, getattr(chosen.wire, "format", None)):
        asked = (
            f"matmuls in {operands.weight.name} of weights that travel as {getattr(chosen.wire, 'name', 'they are')}"
        )
        instead = "Multiply in the format of the wire"
    elif chosen.reduction is not None:
        asked = f"`grad_wire={chosen.grad_wire!r}`, as gradients are summed in the dtype in which the model computes"
        instead = "Leave it out"
    if asked:
        raise ValueError(_refused(asked, path, instead))


def _refused(asked: str, path: Sequence[str], instead: str) -> str:
    return (
        f"the recipe asks for {asked}. That is not supported for weights sharded by `gtp_jax.shard`, such as "
        f"{'.'.join(path)}. {instead}; or build the model of gtp_jax's own layers."
    )


def _seen_as_matrix(shape: tuple[int, ...], placement: Placement) -> tuple[int, Layout] | str:
    """Returns the number of leading dimensions that are features in, and the layout of the matrix; if the weight cannot
    be seen as a matrix, the reason in words."""
    if len(shape) < 2:
        return "it is no matrix"
    inputs = features_in(shape)
    # for each dimension of the weight that may be sharded, the dimension of the matrix that its shards divide
    starts = {0: 0, inputs: 1}
    sizes = math.prod(shape[:inputs]), math.prod(shape[inputs:])
    degrees = dict(placement.degrees)

    def divided(dim: int, axes: tuple[str, ...]) -> Division:
        return Division(starts[dim], axes, tuple(degrees[axis] for axis in axes))

    axes = {dim: (placement.used_axes(dim), placement.gathered_axes(dim)) for dim in range(len(shape))}
    inner = [dim for dim, (used, gathered) in axes.items() if (used or gathered) and dim not in starts]
    if inner:
        return f"dimension {inner[0]} is sharded, whose shards are no rows or columns of a matrix"
    tensor = [divided(dim, used) for dim, (used, _) in axes.items() if used]
    if len(tensor) > 1 or any(len(one.axes) > 1 for one in tensor):
        return "several axes shard it in use"
    split = None
    if tensor:
        size = sizes[tensor[0].dim or 0]
        split = Split(size, 1, (size // tensor[0].ranks,) * tensor[0].ranks, tensor[0].axes[0])
    gathered = sorted((divided(dim, own) for dim, (_, own) in axes.items() if own), key=lambda one: -one.ranks)
    gather, optimizer, *_ = (*gathered, UNDIVIDED, UNDIVIDED)
    (tensor,) = tensor or [UNDIVIDED]
    return inputs, Layout(sizes, gather, optimizer, tensor, rows=1, split_dim=tensor.dim, split=split)


def _cut(layout: Layout, form: Format, *, tiled: bool) -> str:
    """Returns in words why a format's blocks do not fit the matrix; an empty string if they do. Tiles may be larger
    than the matrix."""
    sizes = layout.matrix_of(layout.whole_shape)
    if sizes[1] < form.run[1] and not tiled:
        return f"its rows of {sizes[1]} elements are shorter than a block of {form.name}"
    if cut(layout.matrix_of(layout.shape), sizes, form):
        return f"{layout.tensor.axes[0]} would cut blocks of {form.name}"
    return ""


def _in_order(layout: Layout, form: Format) -> Layout:
    """Returns the layout with the dimension that ranks divide as its rows, if the codes are the same either way. The
    gather then concatenates the shards into the matrix without a copy."""
    rows, cols = form.run
    if layout.by_rows or rows != cols or layout.whole_shape[layout.rows] < cols:
        return layout
    return dataclasses.replace(layout, rows=layout.cols)


def _logical_shape(array: Any, placement: Placement) -> tuple[int, ...]:
    """Returns the logical shape of a weight; in local view, `array` is a shard of it."""
    if current_view() == "global":
        return tuple(array.shape)
    degrees = dict(placement.degrees)
    return tuple(
        size * math.prod(degrees[axis] for axis in placement.axes(dim)) for dim, size in enumerate(array.shape)
    )


def encode(shards: Sequence[Any], weights: Sequence[Coded | None], dtypes: Sequence[np.dtype]) -> tuple[Wire, ...]:
    """Returns the codes of weights, in the view in scope. One kernel computes all amaxes. Weights with the same format,
    dtype and axes share a buffer.

    Args:
        shards: the shards of all weights.
        weights: how each travels; weights with `None` are not quantized, and left out.
        dtypes: the dtype in which each is used.
    """
    groups = _groups(shards, weights, dtypes)
    if not groups:
        return ()
    own: dict[ModulePath, Shards] = {
        (i,): (one.to_matrix(lax.stop_gradient(shards[i])),) for i, one in enumerate(weights) if one is not None
    }
    return quantize_together(groups, own)


def decode(
    wires: Sequence[Wire],
    shards: Sequence[Any],
    weights: Sequence[Coded | None],
    dtypes: Sequence[np.dtype],
    placements: Sequence[Placement],
) -> dict[int, jax.Array]:
    """Gathers codes, in the view in scope, and returns the decoded weights, by number.

    Args:
        wires: what `encode` returned.
        shards: the shards of all weights, or their shapes and dtypes, because only those are read.
        weights: how each travels.
        dtypes: the dtype in which each is used.
        placements: the placements of all weights.
    """
    groups = _groups(shards, weights, dtypes)
    own = {i: one for i, one in enumerate(weights) if one is not None}

    def gather(wires: tuple[Wire, ...]) -> dict[int, jax.Array]:
        fused: dict[Any, Any] = {i: weight for wire in wires for (i,), weight in wire.gather(groups).items()}
        values = {i: _values(fused[i], dtypes[i]) for i in own}
        return {i: values[i] if one.layout.rows == 0 else values[i].T for i, one in own.items()}

    def into(wires: tuple[Wire, ...]) -> tuple[Any]:
        return (tuple(wire.specs(groups) for wire in wires),)

    matrices = in_view(gather, into, {i: one.used for i, one in own.items()})(tuple(wires))
    return {i: jnp.reshape(matrices[i], form_in_use(shards[i], placements[i]).shape) for i in own}


def _values(weight: jax.Array | QuantizedArray, dtype: np.dtype) -> jax.Array:
    """Returns a gathered weight in the dtype in which it is used. Tiles are decoded here: their scales are powers of
    two, so that products which round the values to tiles again multiply the same values."""
    if isinstance(weight, QuantizedArray):
        weight = dequantize(weight, jnp.float32 if dtype == np.float64 else dtype)
    return weight.astype(dtype)


def multiplies(coded: Coded | None, factor: Factor) -> bool:
    """Returns whether a product with a weight is computed in a format.

    Blocks must run along the contraction, or be square; see [Note: order of a view]. If tensor ranks divide the weight,
    the order of its elements must be known even without blocks.
    """
    if coded is None or coded.operands is None:
        return False
    block = coded.operands.weight.block
    if block is None and coded.layout.tensor.ranks == 1:
        return True
    return _in_order_of(coded, factor) or (_turned(coded, factor) and (block is None or block[0] == block[1]))


def product(
    x: jax.Array, weight: Array, coded: Coded, factor: Factor, batch: tuple[str, ...], key: jax.Array
) -> jax.Array:
    """Returns `x @ weight.T` with operands rounded to a recipe's formats, in the view in scope.

    Args:
        x: the input, `(..., features in)`. In global view, the first of two or more dimensions is the batch, which is
            sharded if the ranks divide it evenly.
        weight: the gathered weight, `(features out, features in)`, with the values of its codes.
        coded: the weight's format, of which `multiplies` is true.
        factor: the weight's place in the product.
        batch: the mesh axes that shard the batch.
        key: the key of stochastic rounding, uint32 `(2,)`. In global view, ranks with different parts of the operands
            use different bits.
    """
    operands, (inner, outer) = coded.operands, tuple(coded.used)
    assert operands is not None
    if _turned(coded, factor):
        inner, outer = outer, inner
    names = tuple(axis for axis in batch if axis in jax.sharding.get_abstract_mesh().axis_names)
    divided = x.ndim > 1 and x.shape[0] % degrees(names) == 0
    tokens = (names if divided else None, *[None] * (x.ndim - 2)) if x.ndim > 1 else ()
    parted = (*(names if divided else ()), *(axis for axis in (inner, outer) if axis is not None))
    by_rank = parted if current_view() == "global" and operands.stochastic else ()

    def multiply(x: jax.Array, weight: Array, key: jax.Array) -> jax.Array:
        if operands.weight.block is None:
            y = linear_fp8(x, weight, operands.gradient)
        elif isinstance(coded.form, Tiled):
            y = linear_fp8_blocks(x, weight)
        else:
            key = CallKeys(key).of_rank(lax.axis_index(by_rank).astype(jnp.uint32)).next() if by_rank else key
            y = linear_blocks(x, weight, key, operands)
        return y if inner is None else lax.psum(y, inner)

    parts = PartitionSpec(*tokens, inner), PartitionSpec(outer, inner), PartitionSpec()
    return in_view(multiply, lambda *_: parts, PartitionSpec(*tokens, outer))(x, weight, key)


def _in_order_of(coded: Coded, factor: Factor) -> bool:
    """Returns whether a product contracts the input features of a weight, in order."""
    inputs, outputs = coded.layout.shape
    return (factor.contracted, factor.kept) == (_run(outputs, inputs), _run(1, outputs))


def _turned(coded: Coded, factor: Factor) -> bool:
    """Returns whether a product contracts the output features of a weight, in order."""
    inputs, outputs = coded.layout.shape
    return (factor.contracted, factor.kept) == (_run(1, outputs), _run(outputs, inputs))


def _run(stride: int, size: int) -> Runs:
    return () if size == 1 else ((stride, size),)


def _groups(
    shards: Sequence[Any], weights: Sequence[Coded | None], dtypes: Sequence[np.dtype]
) -> dict[ModulePath, WeightGroup]:
    return {
        (i,): one.group(np.dtype(dtypes[i]), np.dtype(shards[i].dtype))
        for i, one in enumerate(weights)
        if one is not None
    }
