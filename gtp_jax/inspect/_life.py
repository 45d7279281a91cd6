"""Describes the life of one weight in a step: each state, what a rank holds, and the function that makes it."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import hook, weights
from ..formats import Format, Tiled
from ..hlo import columns, quantity
from ..hook import Coded, ShardedWeight
from ..nn import Weight
from ..weights import Kernels, Layers, ModulePath, Packed, Part, StoredCodes, StoredTiles, Tiles, WeightGroup


@dataclasses.dataclass(frozen=True)
class LifeState:
    """One state of a weight.

    Attributes:
        state: the name of the state in `[Note: life of a weight]`.
        when: when, or how often, the state is made.
        what: what a rank holds in this state, in words.
        function: what makes the state: a function, as `module.name`, or words; empty if no function of gtp_jax does.
    """

    state: str
    when: str
    what: str
    function: str


@dataclasses.dataclass(frozen=True)
class WeightLife:
    """The life of one module's kernels in a step, or of one weight that `gtp_jax.shard` has sharded. Prints as a table.

    Attributes:
        module: the path of the module in the model, or of that weight.
        layers: the layers of the stack that this describes, `(first, last)`; `None` outside a stack.
        states: the states, in the order of a step.
    """

    module: str
    layers: tuple[int, int] | None
    states: tuple[LifeState, ...]

    def __str__(self) -> str:
        where = "" if self.layers is None else f", layers {self.layers[0]} to {self.layers[1]}"
        rows = [dataclasses.astuple(state) for state in self.states]
        return f"{self.module}{where}\n" + columns(("state", "made", "what a rank holds", "by"), rows)


@dataclasses.dataclass(frozen=True)
class Lives:
    """What `explain` returns for a `path`: a life for each run of layers that the recipe treats the same way, or for
    each weight that `gtp_jax.shard` has sharded."""

    lives: tuple[WeightLife, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.lives))


def lives_of(
    path: str,
    owners: Mapping[ModulePath, Weight],
    groups: Mapping[tuple[ModulePath, Layers], WeightGroup],
    sharded: Sequence[ShardedWeight],
) -> Lives:
    """Returns the lives of the weights of one module, or of one sharded weight, given its path or the end of it.

    Raises:
        ValueError: if `path` does not fit exactly one module with gathered weights, or one sharded weight; the message
            lists those that it fits, or the nearest names.
    """
    lives: dict[str, list[WeightLife]] = defaultdict(list)
    for (at, layers), group in groups.items():
        lives[".".join(map(str, at))].append(_life(".".join(map(str, at)), layers, group))
    for weight in sharded:
        life = _sharded_life(weight)
        for own in weight.paths:
            for name in dict.fromkeys((".".join(own), ".".join(own[:-1]) or own[-1])):
                lives[name].append(life)
    found = [name for name in lives if name == path] or [name for name in lives if name.endswith(f".{path}")]
    if len({tuple(map(id, lives[name])) for name in found}) != 1:
        near = found or difflib.get_close_matches(path, lives, n=3, cutoff=0.0)
        several, none = "fits several modules or weights", "fits no gathered weight and no module that has one"
        raise ValueError(
            f"`path` is {path!r}, which {several if found else none}. "
            + (f"Name one: {', '.join(map(repr, near))}. " if near else "This model has none. ")
            + "Without `path`, `explain` lists all."
        )
    return Lives(tuple(lives[found[0]]))


def _life(path: str, layers: Layers, group: WeightGroup) -> WeightLife:
    stretch = None if layers.stack is None else (layers.start, layers.stop - 1)
    each = "once per pass" if stretch is None else "once per pass and layer"
    states = [_stored(group), _prepared(group), *_sent(group, each), _gathered(group, each), *_gradients(group, each)]
    return WeightLife(path, stretch, tuple(states))


def _stored(group: WeightGroup) -> LifeState:
    dtype = group.dtype.name if group.frozen else group.param_dtypes[0].name
    dtype = group.wire.name if group.frozen and group.wire is not None else dtype
    parts = ", ".join(f"{dtype} {_shape(one.stored_shape)} of {_shape(one.shape)}" for one in group.layouts)
    spec = group.layouts[0].spec
    frozen = "frozen: no master copy, no gradient; " if group.frozen else ""
    return LifeState("stored", "between steps", f"{frozen}{parts}, {_spec(spec)}", "")


def _prepared(group: WeightGroup) -> LifeState:
    first, when = group.layouts[0], "once per step"
    if group.frozen:
        return LifeState("prepared", when, "nothing to do: it is stored as it is sent", "")
    over = f" joined over {_axes(first.optimizer.axes)}" if group.divided else ""
    if isinstance(group.wire, Format):
        fit = weights.shards_fit([group.layouts], group.wire)
        whole = "" if fit else ", quantized whole because shards would split its blocks"
        amax = ", one amax reduced over all shards" if group.wire.has_amax else ""
        amax = amax if group.delayed is None else ", scaled by the amaxes of earlier steps"
        return LifeState("prepared", when, f"{group.wire.name} codes{over}{amax}{whole}", _name(weights.quantize))
    if isinstance(group.wire, Tiled):
        amax = "one amax for each tile, reduced over all shards"
        return LifeState("prepared", when, f"{group.wire.name} codes{over}, {amax}", _name(weights.quantize))
    if group.wire is not None:
        made = f"{type(group.wire).__name__}.wire"
        return LifeState("prepared", when, f"{group.wire.name}, a custom format{over}", made)
    if group.divided:
        return LifeState("prepared", when, f"{group.dtype.name} shards{over}", _name(weights.prepare))
    return LifeState("prepared", when, "nothing to do", "")


def _sent(group: WeightGroup, each: str) -> list[LifeState]:
    size = quantity(weights.bytes_on_wire(group) // group.layouts[0].shards, "B")
    kind, made = _kind_of_wire(group), _name(weights.frozen_wires if group.frozen else weights.wires_of)
    if group.wire is not None:
        own = f"a wire of {group.wire.name}" if kind is None else kind.__name__
        return [LifeState("on the wire", each, f"{own}: {size} of {group.wire.name}", made)]
    own = f"{Kernels.__name__}: {len(group.layouts)} arrays" if len(group.layouts) > 1 else f"{Kernels.__name__}"
    sent = LifeState("on the wire", each, f"{own}, {size} in {group.dtype.name}", made)
    dtypes = (group.dtype,) * len(group.layouts) if group.frozen or group.divided else group.param_dtypes
    if not group.travels or all(dtype == group.dtype for dtype in dtypes):
        return [sent]
    return [
        sent,
        LifeState("cast and joined", each, f"{Part.__name__}: one array of {group.dtype.name}", _name(Kernels.ready)),
    ]


def _gathered(group: WeightGroup, each: str) -> LifeState:
    first = group.layouts[0]
    rows, cols = sum(weights.use_rows(group.layouts)), first.matrix_of(first.use_shape)[1]
    shape = _shape((*([first.matrices] if first.matrices > 1 else []), rows, cols))
    kind = f"codes of {group.wire.name}" if group.as_codes and group.wire is not None else group.dtype.name
    what = f"fused weight {shape}, {kind}"
    what += f", from {first.ranks} ranks of {_axes(first.axes)}" if group.ranks > 1 else ", no communication"
    wire = _kind_of_wire(group)
    made = f"`gather` of what {type(group.wire).__name__} makes" if wire is None else _name(wire.gather)
    return LifeState("gathered", each, what, made)


def _kind_of_wire(group: WeightGroup) -> Any:
    """Returns the class of what a group sends; `None` for a format of other authors."""
    if isinstance(group.wire, Tiled):
        return StoredTiles if group.frozen else Tiles
    if isinstance(group.wire, Format):
        return StoredCodes if group.frozen else Packed
    return Kernels if group.wire is None else None


def _gradients(group: WeightGroup, each: str) -> list[LifeState]:
    if group.frozen:
        return []
    backward, first = each.replace("pass", "backward"), group.layouts[0]
    slot = f"{group.summed.slot.name}, of the fused weight, not yet summed over ranks"
    sums = []
    if group.ranks > 1 and group.exchanged is not None:
        sums.append(f"all-to-all over {_axes(first.axes)} in {group.exchanged.name}, summed in float32")
    elif group.ranks > 1:
        sums.append(f"reduce-scatter over {_axes(first.axes)} in {group.summed.sums.name}")
    if group.divided:
        sums.append(f"reduce-scatter over {_axes(first.optimizer.axes)} in {group.stored_sums.name}")
    reduced = f"this rank's part of the sum: {'; then '.join(sums)}" if sums else "nothing to do"
    dtypes = ", ".join(dict.fromkeys(dtype.name for dtype in group.param_dtypes))
    stored = f"{dtypes}, in the stored shapes"
    return [
        LifeState("gradient", backward, slot, "the layer's backward"),
        LifeState("reduced", backward, reduced, _name(weights.reduce_gradients)),
        LifeState("gradient of shards", backward, stored, _name(weights.stored_gradients)),
    ]


def _sharded_life(weight: ShardedWeight) -> WeightLife:
    """Returns the life of a weight that the hook gathers: of one slice if calls gather slices of a stacked weight."""
    use = "at least float32 where products compute it" if weight.wide else "the dtype of the weight's use"
    placement, coded = weight.placement, weight.coded
    axes = {dim: placement.axes(dim) for dim in range(len(weight.shape))}
    sizes = dict(placement.degrees)
    whole = placement.with_padding(weight.shape)
    stored = tuple(size // placement.parts(dim) for dim, size in enumerate(whole))
    padded = f", padded to {_shape(whole)}" if placement.padding.size else ""
    over = [axis for dim in axes for axis in placement.gathered_axes(dim)]
    in_use = math.prod(sizes[axis] for dim in axes for axis in placement.used_axes(dim))
    ranks, dtype = math.prod(sizes[axis] for axis in over), weight.dtype.name
    slices = f"{weight.slices} slices, each " if weight.slices > 1 else ""
    share = quantity(weight.bytes // (ranks * in_use), "B")
    when = "once per pass of a call, " + ("ahead of it" if weight.ahead else "as it begins")
    if isinstance(coded, Coded):
        own = coded.wire if isinstance(coded.wire, Format) else None
        amax = ", one amax reduced over all shards" if own is not None and own.has_amax else ""
        amax = ", one amax for each tile, reduced over all shards" if isinstance(coded.wire, Tiled) else amax
        amax = ", scaled by the amaxes of earlier steps" if coded.is_delayed else amax
        once = "once per step" + ("" if coded.is_delayed else ", or once per call under `use_recipe`")
        ready = LifeState("prepared", once, f"{coded.wire.name} codes{amax}", _name(hook.quantized))
        kind = f"a wire of {coded.wire.name}" if own is None else Packed.__name__
        sent = LifeState("on the wire", when, f"{kind}: {share} of {coded.wire.name}", _name(hook.Weights.encode))
    else:
        ready = LifeState("prepared", "once per call", "nothing to do", "")
        sent = LifeState("on the wire", when, f"shard, {share} in {dtype}, or narrower if the call casts it first", "")
    source = f"from {ranks} ranks of {_axes(tuple(over))}" if over else "no communication"
    gathered = f"weight {_shape(weight.shape)}, {source}" + (f", divided among {in_use} ranks" if in_use > 1 else "")
    scattered = f"this rank's part of the sum: reduce-scatter over {_axes(tuple(over))} in that dtype"
    reduced, by = scattered if over else "nothing to do", _name(hook.scatter)
    if weight.exchanged is not None and weight.exchanged.wire is not None:
        use, by = "at least float32 where products compute it", _name(hook.exchange)
        reduced = (
            f"this rank's part of the sum: all-to-all in {weight.exchanged.wire.name} over {_axes(tuple(over))}, "
            "summed in float32"
        )
    states = [
        LifeState(
            "stored",
            "between steps",
            f"{slices}{dtype} {_shape(stored)} of {_shape(weight.shape)}{padded}, {placement.stored}",
            "",
        ),
        ready,
        sent,
        LifeState("gathered", when, gathered, _name(hook.Weights.gather)),
        LifeState("gradient", "once per backward", f"in {use}, not yet summed over ranks", ""),
        LifeState("reduced", "once per backward", reduced, by),
        LifeState("gradient of shards", "once per backward", f"{dtype}, in the stored shape", ""),
    ]
    return WeightLife(".".join(weight.paths[0]), None, tuple(states))


def _name(function: Callable[..., Any]) -> str:
    module = function.__module__.removeprefix("gtp_jax.")
    return f"{module}.{function.__qualname__}"


def _axes(axes: tuple[str, ...]) -> str:
    return " x ".join(axes)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _spec(spec: Any) -> str:
    return f"P({', '.join('None' if one is None else repr(one) for one in spec)})"
