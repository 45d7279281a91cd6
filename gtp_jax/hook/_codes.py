"""Decides which weights a recipe quantizes, quantizes them, and gathers and decodes their codes."""

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
from ..layout import Layout, Matrix, seen_as_matrix
from ..ops import dequantize
from ..recipes import Recipe
from ..weights import ModulePath, Shards, Wire, WireSpec, fills_blocks, in_view, quantize_together, tensor_cuts
from ._matrix import logical_shape
from ._movement import form_in_use
from ._path import paths_of
from ._placement import Placement, placement_of
from ._scope import recipe_in_scope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coded(Matrix):
    """How a quantized weight is gathered and multiplied.

    Attributes:
        wire: the format of the codes that are gathered.
        operands: the formats in which products with the weight are computed, if `multiplies` allows it; `None` if all
            are computed as the model's code says.
    """

    wire: WireFormat
    operands: Operands | None

    @property
    def is_delayed(self) -> bool:
        """Whether its scales follow from the amaxes of earlier steps."""
        return self.operands is not None and self.operands.delayed is not None

    def spec(self, dtype: np.dtype) -> WireSpec:
        """Returns how the weight travels if it is used in a dtype."""
        return WireSpec(
            layouts=(self.layout,),
            dtype=dtype,
            wire=self.wire,
            operands=self.operands,
            codes_multiply=isinstance(self.wire, Tiled) or self.is_delayed,
        )


def coded(variable: nnx.Variable, placement: Placement) -> Coded | None:
    """Returns how a sharded weight is quantized for its gather under the recipe in scope; `None` if it is not
    quantized.

    Raises:
        ValueError: for the same reasons as `decide`.
    """
    recipe, value = recipe_in_scope(), variable.get_raw_value()
    if recipe is None or not hasattr(value, "shape"):
        return None
    decided = decide(recipe, paths_of(variable), logical_shape(value, placement), placement)
    return decided if isinstance(decided, Coded) else None


def moving(variable: Any) -> Placement | None:
    """Returns the placement of a weight that must be gathered or quantized before use; `None` for anything else.

    Raises:
        ValueError: for the same reasons as `placement_of` and `decide`.
    """
    placement = placement_of(variable)
    if placement is None or placement.gathered or coded(variable, placement) is not None:
        return placement
    return None


def decide(
    recipe: Recipe, paths: Sequence[tuple[str, ...]], shape: tuple[int, ...], placement: Placement
) -> Coded | str:
    """Returns how a sharded weight is quantized for its gather under a recipe. If it is not quantized, returns the
    reason in words; the reason is empty if no pattern of the recipe matches the weight and the recipe itself quantizes
    nothing, like `BF16`.

    Args:
        recipe: the recipe.
        paths: the weight's paths in the model. The first pattern that matches any of them applies.
        shape: the logical shape of the weight.
        placement: the placement of the weight, for an array of this shape.

    Raises:
        ValueError: if the recipe asks for something that only gtp_jax's own layers support.
    """
    pattern, chosen = recipe.rule_of(paths)
    _check_supported(recipe, chosen, paths[0])
    if chosen.wire is None:
        return "" if pattern is None else f"it matches {pattern!r}"
    found = seen_as_matrix(shape, placement)
    if isinstance(found, str):
        return found
    if not isinstance(chosen.wire, Format | Tiled):
        return Coded(wire=chosen.wire, operands=None, inputs=found.inputs, layout=found.layout)
    form = chosen.wire.format if isinstance(chosen.wire, Tiled) else chosen.wire
    if not isinstance(chosen.wire, Tiled) and not fills_blocks(found.layout, form):
        return (
            f"after the gather, it has {found.layout.whole_shape[found.layout.cols]} input features per rank, fewer "
            f"than the {form.run[1]} of a block of {form.name}"
        )
    if tensor_cuts(found.layout, form):
        return f"the axis {found.layout.tensor.axes[0]} would cut blocks of {form.name}"
    layout = _in_order(found.layout, form)
    return Coded(wire=chosen.wire, operands=chosen.operands, inputs=found.inputs, layout=layout)


def _check_supported(recipe: Recipe, chosen: Recipe, path: Sequence[str]) -> None:
    """Raises an error if a recipe asks for something that only gtp_jax's own layers support.

    Args:
        recipe: the recipe.
        chosen: the recipe that its rules select for a weight.
        path: a path of that weight, which the message names.
    """
    asked, instead, operands = "", "", chosen.operands
    if recipe.high_precision_first or recipe.high_precision_last:
        asked = "`high_precision_first` or `high_precision_last`, which count the layers of a `Stack`"
        instead = "Leave both at 0, and name blocks in `exclude`, such as ('layers.0',)"
    elif operands is not None and operands.attention:
        asked = "attention in FP8, which only `gtp_jax.Attention` and `gtp_jax.nn.CrossAttention` compute"
        instead = "Pass `attention=False`"
    elif operands is not None and operands.weight not in (chosen.wire, getattr(chosen.wire, "format", None)):
        asked = (
            f"matmuls in {operands.weight.name} of weights that are sent as {getattr(chosen.wire, 'name', 'they are')}"
        )
        instead = "Send weights in the format in which they are multiplied"
    if asked:
        raise ValueError(_refused(asked, path, instead))


def _refused(asked: str, path: Sequence[str], instead: str) -> str:
    return (
        f"the recipe asks for {asked}. That is not supported for weights sharded by `gtp_jax.shard`, such as "
        f"{'.'.join(path)}. {instead}; or build the model from gtp_jax's own layers."
    )


def _in_order(layout: Layout, form: Format) -> Layout:
    """Returns the layout. If the gather joins columns, exchanges rows and columns, so that the gather concatenates rows
    instead. Does not do so if the format's blocks are not square, or longer than the columns."""
    turned, (rows, cols) = dataclasses.replace(layout, rows=layout.cols), form.run
    return turned if not layout.by_rows and rows == cols and fills_blocks(turned, form) else layout


def encode(
    shards: Sequence[Any],
    weights: Sequence[Coded | None],
    dtypes: Sequence[np.dtype],
    amaxes: Sequence[jax.Array | None],
) -> tuple[Wire, ...]:
    """Quantizes weights, in the view in scope, and returns their codes as wires. A wire may hold the codes of several
    weights. Each member of a wire is named `(index,)`, after its weight's index in `weights`.

    Args:
        shards: the shards of all weights.
        weights: how each weight is quantized; `None` for a weight that is not quantized, which the result leaves out.
        dtypes: the dtype in which each weight is used.
        amaxes: the amax that sets the scale of each weight; `None` for a weight that is scaled by its own.
    """
    specs = _specs(shards, weights, dtypes)
    if not specs:
        return ()
    own: dict[ModulePath, Shards] = {
        (i,): (one.to_matrix(lax.stop_gradient(shards[i])),) for i, one in enumerate(weights) if one is not None
    }
    given: dict[ModulePath, jax.Array] = {
        (i,): amax for i, amax in enumerate(amaxes) if amax is not None and (i,) in own
    }
    return quantize_together(specs, own, given)


def decode(
    wires: Sequence[Wire],
    shards: Sequence[Any],
    weights: Sequence[Coded | None],
    dtypes: Sequence[np.dtype],
    placements: Sequence[Placement],
) -> dict[int, jax.Array]:
    """Gathers codes, in the view in scope, and returns the decoded weights. The key of each is its index in `weights`.

    Args:
        wires: the codes of all quantized weights, from `encode` or from the step.
        shards: the shards of all weights, or their `jax.ShapeDtypeStruct`s; only shapes and dtypes are read.
        weights: how each weight is quantized; `None` for a weight that is not quantized, which the result leaves out.
        dtypes: the dtype in which each weight is used.
        placements: the placements of all weights.
    """
    specs = _specs(shards, weights, dtypes)
    own = {i: one for i, one in enumerate(weights) if one is not None}

    def gather(wires: tuple[Wire, ...]) -> dict[int, jax.Array]:
        fused: dict[Any, Any] = {i: weight for wire in wires for (i,), weight in wire.gather(specs).items()}
        values = {i: _values(fused[i], dtypes[i]) for i in own}
        return {i: values[i] if one.layout.rows == 0 else values[i].T for i, one in own.items()}

    def into(wires: tuple[Wire, ...]) -> tuple[Any]:
        return (tuple(wire.specs(specs) for wire in wires),)

    matrices = in_view(gather, into, {i: one.used for i, one in own.items()})(tuple(wires))
    return {i: jnp.reshape(matrices[i], form_in_use(shards[i], placements[i]).shape) for i in own}


def _values(weight: jax.Array | QuantizedArray, dtype: np.dtype) -> jax.Array:
    """Returns a gathered weight in the dtype in which it is used. Decodes codes in tiles, and those with a single
    scale, which may arrive undecoded. A product in tiles rounds the decoded values again, which changes nothing if
    `dtype` holds them exactly."""
    if isinstance(weight, QuantizedArray):
        weight = dequantize(weight, jnp.float32 if dtype == np.float64 else dtype)
    return weight.astype(dtype)


def _specs(
    shards: Sequence[Any], weights: Sequence[Coded | None], dtypes: Sequence[np.dtype]
) -> dict[ModulePath, WireSpec]:
    found: dict[ModulePath, WireSpec] = {}
    for i, one in enumerate(weights):
        if one is not None:
            own = not isinstance(one.wire, Format | Tiled)  # a format of the user's own may support one dtype only
            found[i,] = one.spec(np.dtype(shards[i].dtype if own else dtypes[i]))
    return found
