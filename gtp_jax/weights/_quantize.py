"""Shards, quantized once for many calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ..collectives import Bundle, Packed, Shards, fits_blocks, pack_all, pregather_layers
from ._group import WeightGroup
from ._resolve import Groups, Layers, Path

# What is gathered in place of shards, by path of the module that is the first member of a buffer: of all layers of a
# stack and, ahead of them, of those whose codes have been gathered already.
Quantized = dict[Path, tuple[Packed, ...]]


def quantize(groups: Groups, shards: Mapping[Path, Shards], pregathered_layers: int | Literal["all"] = 0) -> Quantized:
    """Quantizes shards: one amax kernel and one reduction of one vector for all, one launch for each buffer.

    Weights of a stack's layer of one format, dtype and axes share a buffer, but those whose codes are multiplied as
    they lie; every other module has its own. Of a stack all layers are quantized, also those that stay in high
    precision: to leave them out would copy the others' masters.

    Args:
        groups: as `resolve` returns them.
        shards: this rank's, or what it stores of them, by path of the module.
        pregathered_layers: of each stack so many layers, from the first that is quantized, are gathered here, so that
            no pass need gather them.

    Raises:
        ValueError: if codes are to be gathered ahead and no layer of a stack has any, or fewer.
    """
    buffers = _buffers(groups)
    if pregathered_layers:
        check_pregathered_layers(groups, pregathered_layers)
    bundles = []
    for layers, members in buffers:
        own = list(members.values())
        assert own[0].wire is not None
        # members are named as a layer knows them: by their paths within it
        names = {path: () if layers.stack is None else path[len(layers.stack) :] for path in members}
        bundles.append(
            Bundle(
                {names[path]: shards[path] for path in members},
                [group.layouts for group in own],
                own[0].wire,
                powers_of_two=own[0].operands is not None,
                one_scale=own[0].as_codes,
            )
        )
    found: Quantized = {}
    for (layers, members), bundle, packed in zip(buffers, bundles, pack_all(bundles), strict=True):
        count = (
            layers.stop - layers.start
            if pregathered_layers == "all"
            else min(pregathered_layers, layers.stop - layers.start)
        )
        if layers.stack is None or not count:
            found[next(iter(members))] = (packed,)
        else:
            ahead = pregather_layers(packed, bundle.fused, layers.start, layers.start + count)
            found[next(iter(members))] = (ahead, packed)
    return found


def check_pregathered_layers(groups: Groups, pregathered_layers: int | Literal["all"]) -> None:
    """Refuses to hold codes of more layers than have any.

    Raises:
        ValueError: naming how many there are.
    """
    counts = [
        layers.stop - layers.start
        for (_, layers), group in groups.items()
        if group.wire is not None and layers.stack is not None and not group.frozen
    ]
    if not counts:
        raise ValueError(
            f"`pregathered_layers` is {pregathered_layers!r}, but no layers of a `Stack` travel as codes that could be "
            "gathered ahead. Pass a recipe that quantizes them, such as `gtp_jax.NVFP4()`, or `pregathered_layers=0`."
        )
    if pregathered_layers != "all" and pregathered_layers > max(counts):
        raise ValueError(
            f"`pregathered_layers` is {pregathered_layers}, but no `Stack` has more than {max(counts)} layers that "
            "travel as codes. Pass fewer, or 'all'."
        )


def _buffers(groups: Groups) -> list[tuple[Layers, dict[Path, WeightGroup]]]:
    """Returns what travels in one buffer: stacks' ahead of the rest."""
    found: dict[Any, tuple[Layers, dict[Path, WeightGroup]]] = {}
    for (path, layers), group in sorted(groups.items(), key=lambda item: item[0][1].stack is None):
        if group.wire is None or group.frozen:
            continue
        kind = layers, buffer_of(group, path, stacked=layers.stack is not None)
        found.setdefault(kind, (layers, {}))[1][path] = group
    return list(found.values())


def buffer_of(group: WeightGroup, path: Path, *, stacked: bool) -> Any:
    """Returns what weights of a layer have in common that share a buffer: a key."""
    assert group.wire is not None
    alone = path if not stacked or group.as_codes else None
    fits = fits_blocks([group.layouts], group.wire)
    first = group.layouts[0]
    return group.wire, group.operands is not None, alone, group.dtype, first.axes, first.optimizer_axes, fits
