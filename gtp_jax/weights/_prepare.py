"""Prepares weights once per step, for many calls: quantizes shards, or joins them from the parts that ranks store."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ..formats import Format, Tiled
from ..layout import Layout
from ..ops import multi_amax, quantizable
from ._blocks import shards_fit
from ._fused import Shards, bytes_of
from ._group import WeightGroup
from ._optimizer_axes import gather_stored, stored_specs
from ._packed import Packed, pregather_layers
from ._plan import wire_bytes
from ._quantize import Bundle, pack_all
from ._ranks import in_view, ranks_spec
from ._resolve import Groups, Layers
from ._stretch import Stretch
from ._tiles import tile_all, tiled_bytes
from ._value import Scaling
from ._wire import Kernels, OwnFormat, Wire
from ._wire_spec import ModulePath, WireSpec

# The wires to gather instead of shards, by the path of the module that is the first member of each. If two stretches
# contain a layer in its format, the first is used.
Prepared = dict[ModulePath, tuple[Stretch, ...]]

# `_FIRST` layers of a stack are joined first: as many as are gathered before the first layer has been computed. After
# that, `_NEXT` layers are joined at a time: few enough to arrive while two layers compute.
_FIRST, _NEXT = 2, 6


def prepare(
    groups: Groups,
    stored: Mapping[ModulePath, Shards],
    pregathered_layers: int | Literal["all"] = 0,
    rounded: Collection[ModulePath] = (),
    amaxes: Mapping[ModulePath, jax.Array] | None = None,
) -> Prepared:
    """Returns what a step gathers instead of stored arrays, in the view in scope: the codes of weights that travel in a
    format, and the joined shards of other weights if ranks store only parts of them.

    Args:
        groups: the decisions about the weights, as `resolve` returns them.
        stored: what this rank stores, by the path of the module; in global view, whole arrays.
        pregathered_layers: the number of layers to gather here, as in `quantize`.
        rounded: the modules whose arrays hold values of the dtype of the wire and need only a cast. They are prepared
            even if the optimizer's axes do not divide them.
        amaxes: as in `quantize`.

    Raises:
        ValueError: as `quantize` does.
    """
    joined = _joined(groups, stored, rounded)
    quantized = quantize(groups, stored, pregathered_layers, amaxes)
    return {path: (*joined.get(path, ()), *quantized.get(path, ())) for path in {**joined, **quantized}}


def quantize(
    groups: Groups,
    shards: Mapping[ModulePath, Shards],
    pregathered_layers: int | Literal["all"] = 0,
    amaxes: Mapping[ModulePath, jax.Array] | None = None,
) -> Prepared:
    """Quantizes shards, in the view in scope. One launch and one all-reduce compute all amaxes of codes in a `Format`;
    one more all-reduce, those of codes in tiles.

    The weights of a stack's layer for which `buffer_of` returns the same key share a buffer. Every module outside
    stacks has a buffer of its own. In a stack that is written out, each layer's codes may be an array of their own. All
    layers of a stack are quantized, including those that stay in high precision, because leaving them out would copy
    the masters of the others.

    Args:
        groups: the decisions about the weights, as `resolve` returns them.
        shards: this rank's shards, or the parts of them that it stores, by the path of the module; in global view,
            whole arrays.
        pregathered_layers: the number of layers of each stack, from the first that travels as codes, that are gathered
            here, so that no pass has to gather them; `"all"` for all that travel as codes.
        amaxes: the amaxes that set the scales of weights that are scaled by amaxes of earlier steps, float32
            `(*stack,)`, by the path of the module.

    Raises:
        ValueError: if `pregathered_layers` is not 0 and no stack has layers that travel as codes, or every stack has
            fewer of them; if a weight's rows are shorter than a block of its `Format`; or if an `OwnFormat` makes a
            wire with other members, or with a scalar array.
    """
    if pregathered_layers:
        check_pregathered_layers(groups, pregathered_layers)
    buffers = _buffers(groups)
    if not buffers:
        return {}
    fused = {path: group.layouts for _, members in buffers for path, group in members.items()}
    own = {path: shards[path] for path in fused}
    given = {path: amax for path, amax in (amaxes or {}).items() if path in fused}

    def into(own: Mapping[ModulePath, Shards], given: Mapping[ModulePath, jax.Array]) -> tuple[Any, Any]:
        return {path: stored_specs(fused[path], own[path]) for path in own}, dict.fromkeys(given, PartitionSpec())

    stacked = {next(iter(members)): layers.stack is not None for layers, members in buffers}

    def out(made: Prepared) -> Prepared:
        return {path: tuple(one.specs(stacked=stacked[path]) for one in own) for path, own in made.items()}

    def pack(shards: Mapping[ModulePath, Shards], given: Mapping[ModulePath, jax.Array]) -> Prepared:
        bundles = [
            Bundle(
                {_name(path, layers): shards[path] for path in members},
                {_name(path, layers): group for path, group in members.items()},
                apart=not pregathered_layers and layers.written_out,
                given=given.get(next(iter(members))),
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

    # buffers of codes differ from rank to rank; only a format of the user's own may specify other partitions
    known = {path: ranks_spec(stacked=layers) for path, layers in stacked.items()}
    coded = all(isinstance(group.wire, Format) for _, members in buffers for group in members.values())
    return in_view(pack, into, known if coded else out)(own, given)


def quantize_together(
    groups: Mapping[ModulePath, WireSpec],
    shards: Mapping[ModulePath, Shards],
    amaxes: Mapping[ModulePath, jax.Array] | None = None,
) -> tuple[Wire, ...]:
    """Quantizes weights outside stacks, in the view in scope, and returns one wire for each buffer. One launch computes
    all amaxes that a `Format` needs. Weights that are gathered together share a buffer if `buffer_of` returns the same
    key for them.

    Args:
        groups: the decisions about the weights, by name; all of them travel in a format. Weights whose names differ
            only in the last part are gathered together.
        shards: this rank's shards, or the parts of them that it stores, by the same names; in global view, whole
            arrays.
        amaxes: as in `quantize`, by the same names.

    Raises:
        ValueError: if a weight's rows are shorter than a block of its `Format`; or if an `OwnFormat` makes a wire with
            other members, or with a scalar array.
    """
    buffers: dict[Any, dict[ModulePath, WireSpec]] = {}
    for name, group in groups.items():
        buffers.setdefault((name[:-1], buffer_of(group, name, stacked=True)), {})[name] = group

    def into(shards: Mapping[ModulePath, Shards], given: Mapping[ModulePath, jax.Array]) -> tuple[Any, Any]:
        specs = {name: stored_specs(groups[name].layouts, own) for name, own in shards.items()}
        return specs, dict.fromkeys(given, PartitionSpec())

    def pack(shards: Mapping[ModulePath, Shards], given: Mapping[ModulePath, jax.Array]) -> tuple[Wire, ...]:
        bundles = [
            Bundle({name: shards[name] for name in members}, members, given=given.get(next(iter(members))))
            for members in buffers.values()
        ]
        return tuple(_wires(bundles, [False] * len(bundles)))

    def out(made: tuple[Wire, ...]) -> tuple[Any, ...]:
        return tuple(wire.specs(groups) for wire in made)

    coded = all(isinstance(group.wire, Format) for group in groups.values())
    return in_view(pack, into, ranks_spec() if coded else out)(shards, dict(amaxes or {}))


def amaxes_of_weights(
    layouts: Mapping[ModulePath, Sequence[Layout]], shards: Mapping[ModulePath, Shards]
) -> dict[ModulePath, jax.Array]:
    """Returns the amax of each fused weight, float32 `(*stack,)`, in the view in scope. One launch and one all-reduce
    compute them all.

    Args:
        layouts: the layouts of each weight's kernels, by the path of the module.
        shards: this rank's shards, or the parts of them that it stores, by the same paths; in global view, whole
            arrays.
    """

    def into(shards: Mapping[ModulePath, Shards]) -> tuple[Any]:
        return ({path: stored_specs(layouts[path], own) for path, own in shards.items()},)

    def largest(shards: Mapping[ModulePath, Shards]) -> dict[ModulePath, jax.Array]:
        kernels = [quantizable(x) for own in shards.values() for x in own]
        leads = [x.shape[:-2] for x in kernels]
        vector = multi_amax([jnp.reshape(x, (-1, *x.shape[-2:])) for x in kernels], stacked=True)
        names = jax.sharding.get_abstract_mesh().axis_names
        vector = lax.pmax(vector, names) if names else vector
        parts = iter(jnp.split(vector, np.cumsum([math.prod(lead) for lead in leads])[:-1]))
        each = {path: [jnp.reshape(next(parts), x.shape[:-2]) for x in own] for path, own in shards.items()}
        return {path: jnp.max(jnp.stack(own), axis=0) for path, own in each.items()}

    return in_view(largest, into, PartitionSpec())({path: shards[path] for path in layouts})


def scaling_of_replaced(scaling: Scaling, layouts: Sequence[Layout], shards: Shards) -> Scaling:
    """Returns the scaling of a weight of which user code has replaced an array, perhaps by itself, as `nnx.remat` does.

    The amax that sets the weight's scale follows from the arrays of earlier steps. If codes of these arrays would
    saturate by more than E4M3 rounds, half of the last of its three bits, it is replaced by their own.

    Args:
        scaling: the scaling of the weight that was replaced.
        layouts: the layouts of its kernels.
        shards: as in `amaxes_of_weights`.
    """
    own = amaxes_of_weights({(): layouts}, {(): lax.stop_gradient(shards)})[()]
    raised = jnp.where(own > scaling.of_weight * (1 + 2.0**-4), own, scaling.of_weight)
    return dataclasses.replace(scaling, amaxes=scaling.amaxes.at[..., 1].set(raised))


def _wires(bundles: Sequence[Bundle], stacked: Sequence[bool]) -> list[Wire]:
    """Returns the wire of each bundle: codes, for all of which one launch computes the amaxes; codes in tiles, whose
    amaxes are reduced together; or the wire that an `OwnFormat` makes.

    Args:
        bundles: the bundles, in the order of the result.
        stacked: whether the arrays of each bundle have the leading dimension of a stack.
    """
    packed = iter(pack_all([one for one in bundles if isinstance(one.wire, Format)]))
    tiled = iter(tile_all([(one.shards, one.groups) for one in bundles if isinstance(one.wire, Tiled)]))

    def made(bundle: Bundle, layers: bool) -> Wire:
        if isinstance(bundle.wire, Format):
            return next(packed)
        return next(tiled) if isinstance(bundle.wire, Tiled) else _own_wire(bundle, stacked=layers)

    return [made(one, layers) for one, layers in zip(bundles, stacked, strict=True)]


def _own_wire(bundle: Bundle, *, stacked: bool) -> Wire:
    form = bundle.wire
    assert isinstance(form, OwnFormat)
    wire = form.make(bundle.shards, bundle.groups)
    if len(wire.members) != len(bundle.groups) or set(wire.members) != set(bundle.groups):
        raise ValueError(
            f"`make` of the format {form.name} got the weights {list(bundle.groups)}, but returned a wire with the "
            f"members {list(wire.members)}. Pass all of them: `members=tuple(shards)`."
        )
    if wire.format != form:
        raise ValueError(
            f"`make` of the format {form.name} returned a wire with the `format` {wire.format!r}; it must be {form!r}, "
            "or a stack would not find the wire. Pass `self` as its `format`."
        )
    if any(x.ndim <= stacked for x in jax.tree.leaves(wire)):
        raise ValueError(
            f"`make` of the format {form.name} returned a scalar array. Give it a dimension, `scale[..., None]`, "
            "because the global view concatenates the arrays of all ranks."
        )
    return wire


def _name(path: ModulePath, layers: Layers) -> ModulePath:
    """Returns the name of a weight within its layer: the path within the layer, or `()` for a module outside stacks."""
    return () if layers.stack is None else path[len(layers.stack) :]


def _joined(groups: Groups, stored: Mapping[ModulePath, Shards], rounded: Collection[ModulePath]) -> Prepared:
    """Joins shards from the parts that ranks store, by a gather over the optimizer's axes in the dtype of the wire.

    Weights that travel in a format are left to `quantize`, which gathers their codes. Weights that ranks store as whole
    shards are left out, unless they are rounded. If no weights of the model are quantized or rounded, all but the first
    layers of a stack that is written out are gathered last, a few at a time and one gather after another, so that the
    first layers are computed while the others arrive.
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
        if path in coded:  # only layers at the ends of the stack are in high precision
            start, stop = layers.start, layers.stop
        elif not coded and layers.written_out and not rounded:  # rounded weights need no gather
            stop = _FIRST
            for next_start in range(_FIRST, len(mine[0]), _NEXT):
                later.setdefault(next_start, {})[path] = tuple(x[next_start : next_start + _NEXT] for x in mine)
        join(path, start, mine if layers.stack is None else tuple(x[start:stop] for x in mine))
    before: Any = {path: list(own) for path, own in found.items()}
    for start, some in sorted(later.items()):
        some, _ = lax.optimization_barrier((some, before))  # otherwise XLA would combine all gathers in one launch
        before = {path: join(path, start, mine) for path, mine in some.items()}
    return {path: tuple(own) for path, own in found.items()}


def _join(group: WireSpec, stored: Shards) -> Shards:
    """Joins shards from the parts that ranks store; in global view, the results have the partitions of shards."""
    layouts = group.layouts
    joined = in_view(
        lambda stored: gather_stored(stored, layouts, group.dtype),
        lambda stored: (stored_specs(layouts, stored),),
        stored_specs([layout.of_shards for layout in layouts], stored),
    )
    return joined(stored)


def check_pregathered_layers(groups: Groups, pregathered_layers: int | Literal["all"]) -> None:
    """Checks that a stack has the layers that `pregathered_layers` asks for; only layers that travel as codes count.

    Raises:
        ValueError: if no stack has them. The message names the largest number, or says why there are none.
    """
    counts = [
        layers.stop - layers.start
        for (_, layers), group in groups.items()
        if isinstance(group.wire, Format) and layers.stack is not None and not group.frozen
    ]
    if not counts:
        trained = [group.wire for group in groups.values() if group.wire is not None and not group.frozen]
        own = {wire.name for wire in trained if not isinstance(wire, Format)}
        if own:
            raise ValueError(
                f"`pregathered_layers` is {pregathered_layers!r}, but weights are sent in {', '.join(sorted(own))}, "
                "which cannot be gathered in advance. Pass `pregathered_layers=0`."
            )
        raise ValueError(
            f"`pregathered_layers` is {pregathered_layers!r}, but no layers of a `Stack` are sent as codes that "
            "could be gathered in advance. Pass a recipe that quantizes them, such as `gtp_jax.NVFP4()`, or "
            "`pregathered_layers=0`."
        )
    if pregathered_layers != "all" and pregathered_layers > max(counts):
        raise ValueError(
            f"`pregathered_layers` is {pregathered_layers}, but no `Stack` has more than {max(counts)} layers that "
            "are sent as codes. Pass a smaller number, or 'all'."
        )


def _buffers(groups: Groups) -> list[tuple[Layers, dict[ModulePath, WeightGroup]]]:
    """Returns the weights that share each buffer, those of stacks first."""
    found: dict[Any, tuple[Layers, dict[ModulePath, WeightGroup]]] = {}
    for (path, layers), group in sorted(groups.items(), key=lambda item: item[0][1].stack is None):
        if group.wire is None or group.frozen:
            continue
        kind = layers, buffer_of(group, path, stacked=layers.stack is not None)
        found.setdefault(kind, (layers, {}))[1][path] = group
    return list(found.values())


def buffer_of(group: WireSpec, path: ModulePath, *, stacked: bool) -> Any:
    """Returns what weights of a layer have in common if they share a buffer: for example, format, dtype and axes. A
    weight in tiles, or whose codes are multiplied, has a key of its own; without `stacked`, every weight has."""
    assert group.wire is not None
    alone = path if not stacked or group.as_codes or isinstance(group.wire, Tiled) else None
    fits = not isinstance(group.wire, Format) or shards_fit([group.layouts], group.wire)
    first = group.layouts[0]
    return group.wire, group.operands is not None, alone, group.dtype, first.axes, first.optimizer.axes, fits


def bytes_on_wire(group: WireSpec) -> int:
    """Returns the number of bytes of one layer's gathered weight on the wire: those of all ranks' shards."""
    form = group.wire
    if form is None:
        return bytes_of(group.layouts, group.dtype.itemsize)
    if isinstance(form, Format):
        return wire_bytes([group.layouts], form)
    if isinstance(form, Tiled):
        return tiled_bytes(group)
    assert isinstance(form, OwnFormat)
    return form.wire_bytes(group)
