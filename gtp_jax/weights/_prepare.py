"""Shards, made ready for a step: quantized, or joined from what ranks store of them, once for many calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import jax
from jax import lax

from ..formats import Format
from ._fused import Shards, bytes_of
from ._group import ModulePath, WeightGroup
from ._optimizer_axes import gather_stored, stored_specs
from ._packed import Packed, pregather_layers
from ._plan import shards_fit, wire_bytes
from ._quantize import Bundle, pack_all
from ._ranks import in_view, ranks_spec
from ._resolve import Groups, Layers
from ._stretch import Stretch
from ._wire import Kernels, OwnFormat, Wire

# What is gathered in place of shards, by path of the module that is the first member of each wire. Where two stretches
# have a layer, the first counts.
Prepared = dict[ModulePath, tuple[Stretch, ...]]

# Layers of a stack that are joined first, as many as have been gathered when the first has been computed; and how many
# at a time then, few enough to arrive while two layers compute.
_FIRST, _NEXT = 2, 6


def prepare(
    groups: Groups,
    stored: Mapping[ModulePath, Shards],
    pregathered_layers: int | Literal["all"] = 0,
    rounded: Collection[ModulePath] = (),
) -> Prepared:
    """Returns what a step gathers in place of shards, in the view in scope: codes of weights that travel in a format,
    and shards of others, if ranks store only parts of them.

    Args:
        groups: as `resolve` returns them.
        stored: what this rank stores, by path of the module; in global view whole arrays.
        pregathered_layers: as in `quantize`.
        rounded: modules whose arrays have the dtype in which they travel, but for a conversion: taken as they are,
            although no axes divide them further.
    """
    joined = _joined(groups, stored, rounded)
    quantized = quantize(groups, stored, pregathered_layers)
    return {path: (*joined.get(path, ()), *quantized.get(path, ())) for path in {**joined, **quantized}}


def quantize(
    groups: Groups, shards: Mapping[ModulePath, Shards], pregathered_layers: int | Literal["all"] = 0
) -> Prepared:
    """Quantizes shards, in the view in scope: one amax kernel and one reduction of one vector for all, one call for
    each buffer.

    Weights of a stack's layer of one format, dtype and axes share a buffer, except those whose codes are multiplied as
    they lie; every other module has its own. Of a stack that is written out each layer's codes lie apart, unless some
    are gathered here. Of any stack all layers are quantized, also those that stay in high precision: to leave them out
    would copy the others' masters.

    Args:
        groups: as `resolve` returns them.
        shards: this rank's, or what it stores of them, by path of the module; in global view whole arrays.
        pregathered_layers: of each stack so many layers, from the first that is quantized, are gathered here, so that
            no pass need gather them.

    Raises:
        ValueError: if codes are to be gathered ahead and no layer of a stack has any, or fewer.
    """
    if pregathered_layers:
        check_pregathered_layers(groups, pregathered_layers)
    buffers = _buffers(groups)
    if not buffers:
        return {}
    fused = {path: group.layouts for _, members in buffers for path, group in members.items()}
    own = {path: shards[path] for path in fused}

    def into(own: Mapping[ModulePath, Shards]) -> tuple[Any]:
        return ({path: stored_specs(fused[path], own[path]) for path in own},)

    stacked = {next(iter(members)): layers.stack is not None for layers, members in buffers}

    def out(made: Prepared) -> Prepared:
        return {path: tuple(one.specs(stacked=stacked[path]) for one in own) for path, own in made.items()}

    def pack(shards: Mapping[ModulePath, Shards]) -> Prepared:
        bundles = [
            Bundle(
                {_name(path, layers): shards[path] for path in members},
                {_name(path, layers): group for path, group in members.items()},
                apart=not pregathered_layers and layers.written_out,
            )
            for layers, members in buffers
        ]
        wires = _wires(bundles, list(stacked.values()))
        found: Prepared = {}
        for (layers, members), bundle, wire in zip(buffers, bundles, wires, strict=True):
            first, decided = next(iter(members)), tuple(bundle.groups[name] for name in wire.members)
            length = 1 if layers.stack is None else len(shards[first][0])
            ahead: tuple[Stretch, ...] = ()
            quantized = layers.stop - layers.start
            count = quantized if pregathered_layers == "all" else min(pregathered_layers, quantized)
            if isinstance(wire, Packed) and layers.stack is not None and count:
                stop = layers.start + count
                whole = pregather_layers(wire, bundle.fused, layers.start, stop)
                ahead = (Stretch(whole, decided, layers.start, stop),)
            found[first] = (*ahead, Stretch(wire, decided, 0, length))
        return found

    # what each rank sends of codes is its own; only a format of one's own may say otherwise, of what it makes
    known = {path: ranks_spec(stacked=layers) for path, layers in stacked.items()}
    coded = all(isinstance(group.wire, Format) for _, members in buffers for group in members.values())
    return in_view(pack, into, known if coded else out)(own)


def quantize_together(
    groups: Mapping[ModulePath, WeightGroup], shards: Mapping[ModulePath, Shards]
) -> tuple[Wire, ...]:
    """Quantizes weights outside stacks that are gathered together, in the view in scope: one amax kernel for all, and
    one buffer for those of one format, dtype and axes.

    Args:
        groups: what is decided about them, by name; all of them travel in a format.
        shards: this rank's, by the same names; in global view whole arrays.
    """
    buffers: dict[Any, dict[ModulePath, WeightGroup]] = {}
    for name, group in groups.items():
        buffers.setdefault(buffer_of(group, name, stacked=True), {})[name] = group

    def into(shards: Mapping[ModulePath, Shards]) -> tuple[Any]:
        return ({name: stored_specs(groups[name].layouts, own) for name, own in shards.items()},)

    def pack(shards: Mapping[ModulePath, Shards]) -> tuple[Wire, ...]:
        bundles = [Bundle({name: shards[name] for name in members}, members) for members in buffers.values()]
        return tuple(_wires(bundles, [False] * len(bundles)))

    def out(made: tuple[Wire, ...]) -> tuple[Any, ...]:
        return tuple(wire.specs(groups) for wire in made)

    coded = all(isinstance(group.wire, Format) for group in groups.values())
    return in_view(pack, into, ranks_spec() if coded else out)(shards)


def _wires(bundles: Sequence[Bundle], stacked: Sequence[bool]) -> list[Wire]:
    """Returns what is sent of each bundle: codes, of one amax kernel for all, or a wire of its own format.

    Args:
        bundles: in the order of the result.
        stacked: whether the arrays of each have the leading dimension of a stack.
    """
    packed = iter(pack_all([one for one in bundles if isinstance(one.wire, Format)]))
    return [
        next(packed) if isinstance(one.wire, Format) else _own_wire(one, stacked=layers)
        for one, layers in zip(bundles, stacked, strict=True)
    ]


def _own_wire(bundle: Bundle, *, stacked: bool) -> Wire:
    form = bundle.wire
    assert isinstance(form, OwnFormat)
    wire = form.make(bundle.shards, bundle.groups)
    if len(wire.members) != len(bundle.groups) or set(wire.members) != set(bundle.groups):
        raise ValueError(
            f"`make` of the format {form.name} was given the weights {list(bundle.groups)}, and returned a wire with "
            f"the members {list(wire.members)}. Pass it all of them: `members=tuple(shards)`."
        )
    if any(x.ndim <= stacked for x in jax.tree.leaves(wire)):
        raise ValueError(
            f"`make` of the format {form.name} returned an array without a dimension of its own. Give it one: "
            "`scale[..., None]`, as in global view the arrays of all ranks lie one after another."
        )
    return wire


def _name(path: ModulePath, layers: Layers) -> ModulePath:
    """Returns the name of a weight as a layer knows it: its path within the layer."""
    return () if layers.stack is None else path[len(layers.stack) :]


def _joined(groups: Groups, stored: Mapping[ModulePath, Shards], rounded: Collection[ModulePath]) -> Prepared:
    """Gathers over the optimizer's axes what ranks store of shards, in the dtype in which the shards travel.

    Of weights that travel in a format `quantize` gathers the codes. Weights that ranks store as whole shards are left
    out. In a model without codes the layers of stacks that are written out come a few at a time, one gather after the
    other, behind all other weights: so the first layers are computed while the others arrive.
    """
    found: dict[ModulePath, list[Stretch]] = {}
    later: dict[int, dict[ModulePath, Shards]] = {}
    coded = {path for (path, _), group in groups.items() if group.wire is not None}
    kinds = {
        path: (layers, group)
        for (path, layers), group in groups.items()
        if group.wire is None and (group.divided or path in rounded)
    }

    def join(path: ModulePath, start: int, mine: Shards) -> Stretch:
        layers, group = kinds[path]
        wire = Kernels(_join(group, mine), (_name(path, layers),), joined=True)
        own = Stretch(wire, (group,), start, start + (1 if layers.stack is None else len(mine[0])))
        found.setdefault(path, []).append(own)
        return own

    for (path, layers), group in groups.items():
        if path not in kinds or group.wire is not None or (path not in coded and path in found):
            continue
        mine = tuple(lax.stop_gradient(x) for x in stored[path])
        start, stop = 0, None
        if path in coded:  # only the layers at its ends are in high precision
            start, stop = layers.start, layers.stop
        elif not coded and layers.written_out and not rounded:  # what has been rounded is here already
            stop = _FIRST
            for next_start in range(_FIRST, len(mine[0]), _NEXT):
                later.setdefault(next_start, {})[path] = tuple(x[next_start : next_start + _NEXT] for x in mine)
        join(path, start, mine if layers.stack is None else tuple(x[start:stop] for x in mine))
    before: Any = {path: list(own) for path, own in found.items()}
    for start, some in sorted(later.items()):
        some, _ = lax.optimization_barrier((some, before))  # else XLA would join all in one launch
        before = {path: join(path, start, mine) for path, mine in some.items()}
    return {path: tuple(own) for path, own in found.items()}


def _join(group: WeightGroup, stored: Shards) -> Shards:
    """Returns shards, in global view sharded as a gather wants them."""
    layouts = group.layouts
    joined = in_view(
        lambda stored: gather_stored(stored, layouts, group.dtype),
        lambda stored: (stored_specs(layouts, stored),),
        stored_specs([layout.of_shards for layout in layouts], stored),
    )
    return joined(stored)


def check_pregathered_layers(groups: Groups, pregathered_layers: int | Literal["all"]) -> None:
    """Refuses to hold codes of more layers than have any.

    Raises:
        ValueError: naming how many there are.
    """
    counts = [
        layers.stop - layers.start
        for (_, layers), group in groups.items()
        if isinstance(group.wire, Format) and layers.stack is not None and not group.frozen
    ]
    if not counts:
        own = {group.wire.name for group in groups.values() if isinstance(group.wire, OwnFormat)}
        if own:
            raise ValueError(
                f"`pregathered_layers` is {pregathered_layers!r}, and weights travel in {', '.join(sorted(own))}, a "
                "format of your own, which cannot be gathered ahead. Pass `pregathered_layers=0`."
            )
        raise ValueError(
            f"`pregathered_layers` is {pregathered_layers!r}, but no layers of a `Stack` travel as codes that could be "
            "gathered ahead. Pass a recipe that quantizes them, such as `gtp_jax.NVFP4()`, or `pregathered_layers=0`."
        )
    if pregathered_layers != "all" and pregathered_layers > max(counts):
        raise ValueError(
            f"`pregathered_layers` is {pregathered_layers}, but no `Stack` has more than {max(counts)} layers that "
            "travel as codes. Pass fewer, or 'all'."
        )


def _buffers(groups: Groups) -> list[tuple[Layers, dict[ModulePath, WeightGroup]]]:
    """Returns what travels in one buffer: stacks' ahead of the rest."""
    found: dict[Any, tuple[Layers, dict[ModulePath, WeightGroup]]] = {}
    for (path, layers), group in sorted(groups.items(), key=lambda item: item[0][1].stack is None):
        if group.wire is None or group.frozen:
            continue
        kind = layers, buffer_of(group, path, stacked=layers.stack is not None)
        found.setdefault(kind, (layers, {}))[1][path] = group
    return list(found.values())


def buffer_of(group: WeightGroup, path: ModulePath, *, stacked: bool) -> Any:
    """Returns what weights of a layer have in common that share a buffer: a key."""
    assert group.wire is not None
    alone = path if not stacked or group.as_codes else None
    fits = not isinstance(group.wire, Format) or shards_fit([group.layouts], group.wire)
    first = group.layouts[0]
    return group.wire, group.operands is not None, alone, group.dtype, first.axes, first.optimizer.axes, fits


def bytes_on_wire(group: WeightGroup) -> int:
    """Returns the bytes of one layer's gathered weight on the wire, of all ranks' shards."""
    form = group.wire
    if form is None:
        return bytes_of(group.layouts, group.dtype.itemsize)
    if isinstance(form, Format):
        return wire_bytes([group.layouts], form)
    assert isinstance(form, OwnFormat)
    return form.wire_bytes(group)
