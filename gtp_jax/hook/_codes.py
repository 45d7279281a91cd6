"""Quantizes weights that travel as a recipe's codes, and gathers the codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from ..formats import Format, Operands, QuantizedArray, Tiled, WireFormat
from ..layout import Layout
from ..ops import dequantize
from ..recipes import Recipe, matches
from ..weights import ModulePath, Shards, WeightGroup, Wire, cut, in_view, quantize_together
from ._matrix import Matrix, logical_shape, seen_as_matrix
from ._movement import form_in_use
from ._path import paths_of
from ._placement import Placement, placement_of
from ._scope import recipe_in_scope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coded(Matrix):
    """A weight that travels in a format.

    Attributes:
        form: the format.
        operands: the formats in which it is multiplied; `None` if it is multiplied in the model's compute dtype.
    """

    form: WireFormat
    operands: Operands | None

    def group(self, dtype: np.dtype, stored: np.dtype) -> WeightGroup:
        """Returns the weight's group, which holds the decisions about it.

        In a user's own format, the weight is gathered in the dtype in which it is stored, because such a format may
        support only one dtype.

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


def coded(variable: nnx.Variable, placement: Placement) -> Coded | None:
    """Returns how a sharded weight travels under the recipe in scope; `None` if it is not quantized.

    Raises:
        ValueError: for the same reasons as `decide`.
    """
    recipe, value = recipe_in_scope(), variable.get_raw_value()
    if recipe is None or not hasattr(value, "shape"):
        return None
    decided = decide(recipe, paths_of(variable), logical_shape(value, placement), placement)
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
    if the recipe quantizes no weights.

    Args:
        recipe: the recipe.
        paths: the weight's paths in the model; a pattern that matches any of them applies.
        shape: its logical shape.
        placement: its placement, for an array of this shape.

    Raises:
        ValueError: if the recipe asks for something that only gtp_jax's own layers support.
    """
    pattern, chosen = rule_of(recipe, paths)
    _check_supported(recipe, chosen, paths[0])
    if chosen.wire is None:
        return "" if pattern is None else f"it matches {pattern!r}"
    found = seen_as_matrix(shape, placement)
    if isinstance(found, str):
        return found
    if not isinstance(chosen.wire, Format | Tiled):
        return Coded(form=chosen.wire, operands=None, inputs=found.inputs, layout=found.layout)
    form = chosen.wire.format if isinstance(chosen.wire, Tiled) else chosen.wire
    if reason := _cut(found.layout, form, tiled=isinstance(chosen.wire, Tiled)):
        return reason
    layout = _in_order(found.layout, form)
    return Coded(form=chosen.wire, operands=chosen.operands, inputs=found.inputs, layout=layout)


def rule_of(recipe: Recipe, paths: Sequence[tuple[str, ...]]) -> tuple[str | None, Recipe]:
    """Returns the first of a recipe's patterns that matches one of a weight's paths, with the recipe for it; `None` and
    the recipe itself if no pattern does."""
    rules = (rule for rule in recipe.rules if any(matches(rule[0], path) for path in paths))
    return next(rules, (None, recipe))


def _check_supported(recipe: Recipe, chosen: Recipe, path: Sequence[str]) -> None:
    """Raises an error if a recipe asks for more than quantized weights and matmuls."""
    asked, instead, operands = "", "", chosen.operands
    if recipe.high_precision_first or recipe.high_precision_last:
        asked = "`high_precision_first` and `high_precision_last`, which count the layers of a `Stack`"
        instead = "Name blocks in `exclude`, such as ('layers.0',)"
    elif operands is not None and operands.delayed is not None:
        asked = f"`{type(chosen).__name__}`, whose amaxes of earlier steps only gtp_jax's own layers keep"
        instead = "Pass `gtp_jax.FP8(matmuls=True)`"
    elif operands is not None and operands.weight not in (chosen.wire, getattr(chosen.wire, "format", None)):
        asked = (
            f"matmuls in {operands.weight.name} of weights that travel as {getattr(chosen.wire, 'name', 'they are')}"
        )
        instead = "Multiply in the format of the wire"
    if asked:
        raise ValueError(_refused(asked, path, instead))


def _refused(asked: str, path: Sequence[str], instead: str) -> str:
    return (
        f"the recipe asks for {asked}. That is not supported for weights sharded by `gtp_jax.shard`, such as "
        f"{'.'.join(path)}. {instead}; or build the model of gtp_jax's own layers."
    )


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
    """Returns a gathered weight in the dtype in which it is used. Tiles are decoded here. Their scales are powers of
    two, so products that round the values to tiles again multiply the same values."""
    if isinstance(weight, QuantizedArray):
        weight = dequantize(weight, jnp.float32 if dtype == np.float64 else dtype)
    return weight.astype(dtype)


def _groups(
    shards: Sequence[Any], weights: Sequence[Coded | None], dtypes: Sequence[np.dtype]
) -> dict[ModulePath, WeightGroup]:
    return {
        (i,): one.group(np.dtype(dtypes[i]), np.dtype(shards[i].dtype))
        for i, one in enumerate(weights)
        if one is not None
    }
