"""What a recipe makes of a model, in words: so that nothing is silently left as it was."""

from __future__ import annotations

import dataclasses

import numpy as np
from flax import nnx

from ..collectives import plan_of
from ..formats import Format, Operands
from ..plan import columns, quantity
from ..recipes import Recipe, check_recipe
from ._dense import Dense
from ._weight import WeightOwner, weight_owners


@dataclasses.dataclass(frozen=True)
class WireFact:
    """How the weights of one module travel.

    Attributes:
        module: its path in the model.
        shapes: logical shapes of its kernels, of one layer.
        layers: how many layers it stands for.
        wire: name of the format, or of the dtype.
        bytes: of one layer's gathered weights on the wire, codes and scales of all slices together.
        bytes_per_element: of that, for each logical element.
        matmul: what the matmuls run in.
    """

    module: str
    shapes: tuple[tuple[int, ...], ...]
    layers: int
    wire: str
    bytes: int
    bytes_per_element: float
    matmul: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A line a module, as a table when printed."""

    facts: tuple[WireFact, ...]

    def __str__(self) -> str:
        header = ("module", "layers", "kernels", "wire", "a layer", "B/element", "matmul")
        rows = [
            (
                fact.module,
                fact.layers,
                " ".join("x".join(map(str, shape)) for shape in fact.shapes),
                fact.wire,
                quantity(fact.bytes, "B"),
                f"{fact.bytes_per_element:.3f}",
                fact.matmul,
            )
            for fact in self.facts
        ]
        return columns(header, rows, right=(1, 4, 5))


def explain(model: nnx.Module, recipe: Recipe | None) -> Explanation:
    """Says of each weight of a model what a recipe does with it.

    Args:
        model: may be abstract.
        recipe: such as `gtp_jax.NVFP4()`.

    Raises:
        TypeError: if `recipe` is something else.
        ValueError: if slices cut the format's blocks in two.
    """
    check_recipe(recipe)
    found = []
    for path, owner in weight_owners(model).items():
        form = None if recipe is None else recipe.wire_of(path)
        layouts, value = owner.layouts, owner.weights()[0].get_value()
        stacked = value.ndim > len(layouts[0].shape)
        tp = max(layout.tp if layout.tp_dim is not None else 1 for layout in layouts)
        slices = tp * layouts[0].gtp
        if form is None:
            total = slices * sum(int(np.prod(layout.slice_shape)) for layout in layouts) * owner.dtype.itemsize
        else:
            total = slices * plan_of([layouts], form).bytes(form)
        elements = sum(int(np.prod(layout.shape)) for layout in layouts)
        found.append(
            WireFact(
                module=".".join(map(str, path)),
                shapes=tuple(layout.shape for layout in layouts),
                layers=value.shape[0] if stacked else 1,
                wire=owner.dtype.name if form is None else form.name,
                bytes=total,
                bytes_per_element=total / elements,
                matmul=_matmul(owner, form, None if recipe is None else recipe.operands_of(path)),
            )
        )
    return Explanation(tuple(found))


def _matmul(owner: WeightOwner, wire: Format | None, operands: Operands | None) -> str:
    if operands is not None and isinstance(owner, Dense):
        return f"{operands.activation.name}, gradients {operands.gradient.name}"
    return owner.dtype.name if wire is None else f"{owner.dtype.name}, of dequantized weights"
