"""A model's weights, quantized once for many calls."""

from __future__ import annotations

from typing import Any

from flax import nnx

from ..collectives import Bundle, Packed, pack_all
from ..recipes import Recipe
from ._stack import Stack
from ._weight import WeightOwner, weight_owners

Path = tuple[Any, ...]

# What a module gathers in place of its slices, or a stack in place of its layers'.
Quantized = dict[Path, tuple[Packed, ...]]


def quantize_weights(model: nnx.Module, recipe: Recipe) -> Quantized:
    """Quantizes the weights of a model in local view, as the recipe says. By path of the module that gathers them."""
    found = _bundles(model, recipe)
    packed = pack_all([bundle for _, bundle in found])
    quantized: Quantized = {}
    for (path, _), one in zip(found, packed, strict=True):
        quantized[path] = (*quantized.get(path, ()), one)
    return quantized


def put_quantized(model: nnx.Module, quantized: Quantized, recipe: Recipe) -> None:
    """Has the model's modules gather these from now on, and multiply as the recipe says; gradients still go to their
    parameters."""
    for path, owner in weight_owners(model).items():
        owner.fp8_gradients = recipe.gradients_of(path)
    for path, module in nnx.iter_modules(model):
        if path in quantized:
            assert isinstance(module, WeightOwner | Stack)
            module.packed = nnx.data(quantized[path])


def _bundles(model: nnx.Module, recipe: Recipe) -> list[tuple[Path, Bundle]]:
    """What travels together: weights of a stack's layer of one format, dtype and axes; each other module's own."""
    stacks = {path: m for path, m in nnx.iter_modules(model) if isinstance(m, Stack)}
    found: list[tuple[Path, Bundle]] = []
    for path, stack in stacks.items():
        groups: dict[Any, dict[Path, WeightOwner]] = {}
        for inner, owner in weight_owners(stack.layers).items():
            form = recipe.wire_of((*path, *inner))
            if form is not None:
                groups.setdefault((form, owner.dtype, owner.layouts[0].axes), {})[inner] = owner
        found += [(path, _bundle(members, form, recipe)) for (form, *_), members in groups.items()]
    for path, owner in weight_owners(model).items():
        form = recipe.wire_of(path)
        if form is not None and not any(path[: len(stack)] == stack for stack in stacks):
            found.append((path, _bundle({(): owner}, form, recipe)))
    return found


def _bundle(owners: dict[Path, WeightOwner], form: Any, recipe: Recipe) -> Bundle:
    slices = {path: owner.slices() for path, owner in owners.items()}
    return Bundle(slices, [o.layouts for o in owners.values()], form, powers_of_two=recipe.gradients is not None)
