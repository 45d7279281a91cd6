"""A model's weights, quantized once for many calls."""

from __future__ import annotations

from typing import Any

from flax import nnx

from ..collectives import Packed, pack_all
from ..formats import Format
from ..recipes import Recipe
from ._weight import WeightOwner

Path = tuple[Any, ...]


def quantized_owners(model: nnx.Module, recipe: Recipe | None) -> dict[Path, tuple[WeightOwner, Format]]:
    """The modules whose weights a recipe quantizes, by path, with the format."""
    if recipe is None:
        return {}
    owners = {path: m for path, m in nnx.iter_modules(model) if isinstance(m, WeightOwner)}
    formats = {path: recipe.wire_of(path) for path in owners}
    return {path: (owner, form) for path, owner in owners.items() if (form := formats[path]) is not None}


def quantize_weights(model: nnx.Module, recipe: Recipe | None) -> dict[Path, Packed]:
    """Quantizes all weights of a model in local view, as the recipe says."""
    owners = quantized_owners(model, recipe)
    packed = pack_all([(owner.slices(), owner.layouts, form) for owner, form in owners.values()])
    return dict(zip(owners, packed, strict=True))


def put_quantized(model: nnx.Module, packed: dict[Path, Packed]) -> None:
    """Has the model's modules gather these from now on; gradients still go to their parameters."""
    for path, module in nnx.iter_modules(model):
        if path in packed:
            assert isinstance(module, WeightOwner)
            module.packed = nnx.data(packed[path])
