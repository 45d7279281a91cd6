"""A model's weights, quantized once for many calls."""

from __future__ import annotations

from typing import Any, Literal

import jax
from flax import nnx

from ..collectives import Bundle, Packed, fits_blocks, hold_layers, pack_all
from ..formats import Format
from ..recipes import KEPT, Recipe, matches
from ._rounding import CallKeys, key_for
from ._stack import Stack, stacks_of
from ._weight import WeightOwner, weight_owners

Path = tuple[Any, ...]

# What a module gathers in place of its slices, or a stack in place of its layers'.
Quantized = dict[Path, tuple[Packed, ...]]


def quantize_weights(model: nnx.Module, recipe: Recipe, held: int | Literal["all"] = 0) -> Quantized:
    """Quantizes the weights of a model in local view, as the recipe says. By path of the module that gathers them.

    Args:
        model: in local view.
        recipe: what is quantized.
        held: of each stack so many layers, from the first that the recipe quantizes, are gathered here, so that no pass
            need gather them.

    Raises:
        ValueError: if the recipe speaks of modules or layers that the model does not have; if codes are to be held and
            no layer of a stack has any.
    """
    check_names(model, recipe)
    found = _bundles(model, recipe)
    packed = pack_all([bundle for _, bundle in found])
    stacks = stacks_of(model)
    first = recipe.keep_first
    counts = {path: m.length - first - recipe.keep_last for path, m in stacks.items()}
    if held and not any(counts.get(path) for path, _ in found):
        raise ValueError(
            f"`held` is {held!r}, but no layers of a `Stack` travel as codes that could be held. Pass a recipe that "
            "quantizes them, such as `gtp_jax.NVFP4()`, or `held=0`."
        )
    most = max(counts.values(), default=0)
    if held != "all" and held > most:
        raise ValueError(
            f"`held` is {held}, but no `Stack` has more than {most} layers that travel as codes. Pass fewer, or 'all'."
        )
    quantized: Quantized = {}
    for (path, bundle), one in zip(found, packed, strict=True):
        count = counts.get(path, 0) if held == "all" else min(held, counts.get(path, 0))
        parts = (hold_layers(one, bundle.fused, first, first + count), one) if count else (one,)
        quantized[path] = (*quantized.get(path, ()), *parts)
    return quantized


def put_quantized(model: nnx.Module, quantized: Quantized, recipe: Recipe, key: jax.Array | None = None) -> None:
    """Has the model's modules gather these from now on, multiply and sum gradients as the recipe says; gradients still
    go to their parameters.

    Args:
        model: in local view.
        quantized: what `quantize_weights` made.
        recipe: the same.
        key: uint32 `(2,)`, for stochastic rounding: of this step, microbatch and rank; without gradients none.
    """
    for path, owner in weight_owners(model).items():
        owner.operands = recipe.operands_of(path)
        owner.reduction = recipe.reduction_of(path)
        if key is not None and owner.operands is not None and owner.operands.stochastic:
            owner.keys = nnx.data(CallKeys(key_for(key, path)))
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Stack):
            module.kept = (recipe.keep_first, recipe.keep_last)
            module.keys = nnx.data(None if key is None else CallKeys(key_for(key, path)))
            for owner in weight_owners(module.layers).values():
                owner.keys = nnx.data(None)  # the chain has one for each layer
        if path in quantized:
            assert isinstance(module, WeightOwner | Stack)
            module.packed = nnx.data(quantized[path])


def check_names(model: nnx.Module, recipe: Recipe) -> None:
    """Refuses a recipe that speaks of what a model does not have, so that no name is misspelt unseen.

    Raises:
        ValueError: naming what there is; or the patterns, if those ahead leave nothing to one; or if the model has no
            weights for a recipe that quantizes.
    """
    paths = [tuple(map(str, path)) for path in weight_owners(model)]
    if not paths and recipe.wire is not None:
        raise ValueError(
            f"`recipe` quantizes to {recipe.wire.name}, but {type(model).__name__} has no weights that are gathered, "
            "which are those it can quantize. Build the model of gtp_jax's modules, such as `gtp_jax.Dense`, or leave "
            "the recipe out."
        )
    patterns = [pattern for pattern, _ in recipe.rules]
    for index, pattern in enumerate(patterns):
        if index >= len(recipe.override) and pattern in KEPT:
            continue  # kept where there is one
        matched = [path for path in paths if matches(pattern, path)]
        if matched and all(any(matches(ahead, path) for ahead in patterns[:index]) for path in matched):
            raise ValueError(
                f"the recipe's pattern {pattern!r} never counts: all that it matches, an earlier one does. Put it "
                f"ahead of {', '.join(map(repr, patterns[:index]))}."
            )
        if not matched:
            raise ValueError(
                f"the recipe's pattern {pattern!r} matches no module with weights; they are "
                f"{', '.join('.'.join(path) for path in paths)}."
            )
    stacks = {".".join(map(str, path)): stack.length for path, stack in stacks_of(model).items()}
    ends = recipe.keep_first + recipe.keep_last
    if ends and (not stacks or ends > min(stacks.values())):
        there = ", ".join(f"{name} has {length}" for name, length in stacks.items()) or "there is no `Stack`"
        raise ValueError(
            f"`keep_first` {recipe.keep_first} and `keep_last` {recipe.keep_last} ask for {ends} layers of each stack; "
            f"{there}."
        )


def _bundles(model: nnx.Module, recipe: Recipe) -> list[tuple[Path, Bundle]]:
    """What travels together: weights of a stack's layer of one format, dtype and axes, but those by themselves whose
    codes are multiplied as they lie; each other module's own.

    Of a stack all layers, also those that stay in high precision: to leave them out would copy the others' masters.
    """
    stacks = stacks_of(model)
    found: list[tuple[Path, Bundle]] = []
    for path, stack in stacks.items():
        groups: dict[Any, dict[Path, WeightOwner]] = {}
        for inner, owner in weight_owners(stack.layers).items():
            chosen = recipe.of((*path, "layers", *inner))  # the module's path in the model, as `explain` prints it
            if chosen.wire is not None:
                alone = inner if owner.takes_codes(chosen.operands) else None
                fits = fits_blocks([owner.layouts], chosen.wire)
                kind = (chosen.wire, chosen.operands is not None, alone, owner.dtype, owner.layouts[0].axes, fits)
                groups.setdefault(kind, {})[inner] = owner
        found += [
            (path, _bundle(members, form, exact, alone is not None))
            for (form, exact, alone, *_), members in groups.items()
        ]
    for path, owner in weight_owners(model).items():
        chosen = recipe.of(path)
        if chosen.wire is not None and not any(path[: len(stack)] == stack for stack in stacks):
            as_codes = owner.takes_codes(chosen.operands)
            found.append((path, _bundle({(): owner}, chosen.wire, chosen.operands is not None, as_codes)))
    return found


def _bundle(owners: dict[Path, WeightOwner], form: Format, exact: bool, as_codes: bool) -> Bundle:
    slices = {path: owner.slices() for path, owner in owners.items()}
    layouts = [owner.layouts for owner in owners.values()]
    return Bundle(slices, layouts, form, powers_of_two=exact, one_scale=as_codes)
