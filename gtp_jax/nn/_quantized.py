"""A model's weights, quantized once for many calls."""

from __future__ import annotations

from typing import Any, Literal

from flax import nnx

from ..collectives import Bundle, Packed, hold_first, pack_all
from ..recipes import Recipe
from ._stack import Stack
from ._weight import WeightOwner, weight_owners

Path = tuple[Any, ...]

# What a module gathers in place of its slices, or a stack in place of its layers'.
Quantized = dict[Path, tuple[Packed, ...]]


def quantize_weights(model: nnx.Module, recipe: Recipe, held: int | Literal["all"] = 0) -> Quantized:
    """Quantizes the weights of a model in local view, as the recipe says. By path of the module that gathers them.

    Args:
        model: in local view.
        recipe: what is quantized.
        held: of each stack so many layers, from its first, are gathered here, so that no pass need gather them.

    Raises:
        ValueError: if codes are to be held and no layer of a stack has any.
    """
    found = _bundles(model, recipe)
    packed = pack_all([bundle for _, bundle in found])
    lengths = {path: m.length for path, m in nnx.iter_modules(model) if isinstance(m, Stack)}
    if held and not any(path in lengths for path, _ in found):
        raise ValueError(
            f"`held` is {held!r}, but no layers of a `Stack` travel as codes that could be held. Pass a recipe that "
            "quantizes them, such as `gtp_jax.NVFP4()`, or `held=0`."
        )
    quantized: Quantized = {}
    for (path, bundle), one in zip(found, packed, strict=True):
        count = 0 if path not in lengths else lengths[path] if held == "all" else min(held, lengths[path])
        parts = hold_first(one, bundle.fused, count) if count else (one,)
        quantized[path] = (*quantized.get(path, ()), *(p for p in parts if p.buffer.shape[0]))
    return quantized


def put_quantized(model: nnx.Module, quantized: Quantized, recipe: Recipe) -> None:
    """Has the model's modules gather these from now on, multiply and sum gradients as the recipe says; gradients still
    go to their parameters."""
    for path, owner in weight_owners(model).items():
        owner.fp8_gradients = recipe.gradients_of(path)
        owner.reduction = recipe.reduction_of(path)
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
