"""Quantizes shards into the buffers that are sent, once per step. Called inside a `shard_map`.

[Note: stored]
If the optimizer's axes divide shards in storage, each rank quantizes the part that it stores, and the codes are
gathered over these axes once. If that would cut blocks, the masters are gathered first, and whole shards are quantized,
as if each rank stored them. The resulting bytes are the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format, PackPlan, WireFormat
from ..layout import Layout, axes_in_use
from ..mesh import degrees
from ..ops import multi_amax, pack, pack_apart, power_of_two_amax, quantizable
from ._blocks import Fused, shards_fit, stored_fit
from ._fused import Shards, whole_kernels
from ._optimizer_axes import gather_stored, is_divided
from ._packed import Packed
from ._plan import bytes_sent, plan_of
from ._stretch import Apart
from ._wire_spec import ModulePath, WireSpec


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Weights that are to share a buffer.

    Attributes:
        shards: this rank's shards of each fused weight's kernels, or the parts of them that it stores, by name of the
            weight, with or without the leading dimension of a stack.
        groups: the decisions about the weights, by the same names. `buffer_of` returns the same key for all of them.
        apart: whether each layer of a stack gets a buffer of its own where that costs nothing.
        given: the amax that sets the scale, float32 `(*stack,)`, for a single weight that is scaled by amaxes of
            earlier steps; `None` for weights that are scaled by their own.
    """

    shards: Mapping[ModulePath, Shards]
    groups: Mapping[ModulePath, WireSpec]
    apart: bool = False
    given: jax.Array | None = None

    @property
    def fused(self) -> Fused:
        """The layouts of each fused weight's kernels."""
        return [self.groups[name].layouts for name in self.shards]

    @property
    def wire(self) -> WireFormat | None:
        """The format in which they travel."""
        return self._first.wire

    @property
    def format(self) -> Format:
        """The format of the codes; the weights must travel in one of this library's formats."""
        assert isinstance(self.wire, Format)
        return self.wire

    @property
    def has_own_amax(self) -> bool:
        """Whether its scales follow from the amaxes of its shards."""
        return self.format.has_amax and self.given is None

    @property
    def powers_of_two(self) -> bool:
        """Whether a scale that follows from a tensor's own amax is rounded to a power of two. This is so if the
        weights are multiplied in a format."""
        return self._first.operands is not None

    @property
    def one_scale(self) -> bool:
        """Whether all kernels of a fused weight have the same scale, so that its codes can be multiplied."""
        return self._first.as_codes

    @property
    def _first(self) -> WireSpec:
        return next(iter(self.groups.values()))

    @property
    def kernels(self) -> list[jax.Array]:
        """This rank's part of each kernel, `(*stack, matrices, ...)`, in stored order; a dense layer has one matrix."""
        weights = zip(self.shards.values(), self.fused, strict=True)
        return [quantizable(_as_matrices(x, layouts)) for shards, layouts in weights for x in shards]

    @property
    def own_axes(self) -> list[tuple[str, ...]]:
        """For each matrix of `kernels` in turn, the axes whose ranks have an amax each, because they have different
        experts. Ranks of all other axes share an amax."""
        kinds = [_own_axes(one) for layouts in self.fused for one in layouts]
        counts = [math.prod(x.shape[:-2]) for x in self.kernels]
        return [axes for axes, count in zip(kinds, counts, strict=True) for _ in range(count)]

    def by_piece(self, amaxes: Sequence[jax.Array]) -> jax.Array:
        """Returns amaxes `(*stack, pieces)` in the order of matrices in the buffer: the kernels of one expert after
        another.

        Args:
            amaxes: the amaxes of each of `kernels`, `(*stack, matrices)`.
        """
        left = iter(amaxes)
        each = [jnp.stack([next(left) for _ in layouts], axis=-1) for layouts in self.fused]
        return jnp.concatenate([jnp.reshape(x, (*x.shape[:-2], -1)) for x in each], axis=-1)


def pack_all(bundles: Sequence[Bundle]) -> list[Packed]:
    """Quantizes shards. One launch and one all-reduce compute the amaxes of all bundles.

    The amax of a weight is taken over the axes that shard it, but not over replicas, whose values are the same. Parts
    of shards that ranks store are joined to shards; see [Note: stored].
    """
    scaled = [x for bundle in bundles if bundle.has_own_amax for x in bundle.kernels]
    amaxes: list[jax.Array] = []
    if scaled:
        each = multi_amax([jnp.reshape(x, (-1, *x.shape[-2:])) for x in scaled], stacked=True)
        vector = _over_shards(each, [b for b in bundles if b.has_own_amax])
        ends = np.cumsum([math.prod(x.shape[:-2]) for x in scaled])
        parts = jnp.split(vector, ends[:-1])
        amaxes = [jnp.reshape(part, x.shape[:-2]) for part, x in zip(parts, scaled, strict=True)]
    found = []
    for bundle in bundles:
        amax = None
        if bundle.given is not None:
            amax = jnp.broadcast_to(bundle.given[..., None], (*bundle.given.shape, len(bundle.kernels)))
        elif bundle.has_own_amax:
            mine, amaxes = amaxes[: len(bundle.kernels)], amaxes[len(bundle.kernels) :]
            amax = bundle.by_piece(mine)
            if bundle.one_scale:
                amax = _largest_of_each(
                    amax, [len(layouts) for layouts in bundle.fused for _ in range(layouts[0].matrices)]
                )
            if bundle.powers_of_two:
                amax = power_of_two_amax(amax, bundle.format)
        if shards_fit(bundle.fused, bundle.format):
            buffer = _pack_shards(bundle, amax)
        else:
            buffer = _pack_whole(bundle, amax)
        found.append(Packed(buffer, amax, bundle.format, tuple(bundle.shards)))
    return found


def _pack_shards(bundle: Bundle, amax: jax.Array | None) -> jax.Array | Apart:
    """Returns the buffer of this rank's shards; see [Note: stored]."""
    form, fused, plan = bundle.format, bundle.fused, plan_of(bundle.fused, bundle.format)
    first = fused[0][0]
    if not is_divided(next(iter(bundle.shards.values()))[0], first):
        if bundle.apart:
            return Apart(pack_apart(bundle.kernels, form, amax, plan))
        return pack(bundle.kernels, form, amax, plan)
    if not stored_fit(fused, form):
        kernels = {
            name: gather_stored(stored, layouts)
            for (name, stored), layouts in zip(bundle.shards.items(), fused, strict=True)
        }
        return pack(dataclasses.replace(bundle, shards=kernels).kernels, form, amax, plan)
    stored_plan = plan_of(fused, form, stored=True)
    parts = lax.all_gather(pack(bundle.kernels, form, amax, stored_plan), first.optimizer.axes, axis=0)
    by_rows = [
        one.optimizer.dim == one.rows for layouts in fused for _ in range(layouts[0].matrices) for one in layouts
    ]
    return _join_stored(parts, by_rows, form, stored_plan, plan)


def _join_stored(
    parts: jax.Array, by_rows: Sequence[bool], form: Format, stored: PackPlan, plan: PackPlan
) -> jax.Array:
    """Returns the buffer of shards, joined from the buffers of what ranks store.

    Args:
        parts: the buffers of all ranks, `(ranks, *stack, bytes)`.
        by_rows: for each piece, whether ranks divide its rows instead of its columns.
        form: the format of the codes.
        stored: the positions of pieces in each rank's buffer.
        plan: the positions of pieces in the result.
    """
    pairs = []
    for rows, (codes, scales), (whole, whole_scales) in zip(
        by_rows, stored.sections(form), plan.sections(form), strict=True
    ):
        pairs.append((rows, codes, whole))
        if scales is not None and whole_scales is not None:
            pairs.append((rows, scales, whole_scales))
    pieces = []
    end = 0
    for rows, part, whole in sorted(pairs, key=lambda pair: pair[2].start):
        lead = parts.shape[1:-1]
        matrices = jnp.reshape(parts[..., part.start : part.start + part.bytes], (len(parts), *lead, *part.shape))
        matrix = jnp.concatenate([matrices[rank] for rank in range(len(parts))], axis=-2 if rows else -1)
        matrix = matrix[..., : whole.shape[0], : whole.shape[1]]  # without padding, whose codes are 0
        flat = jnp.reshape(matrix, (*lead, whole.bytes))
        pieces.append(jnp.pad(flat, (*((0, 0),) * len(lead), (whole.start - end, 0))))
        end = whole.start + whole.bytes
    joined = jnp.concatenate(pieces, axis=-1)
    return jnp.pad(joined, (*((0, 0),) * (joined.ndim - 1), (0, plan.bytes(form) - end)))


def _pack_whole(bundle: Bundle, amax: jax.Array | None) -> jax.Array:
    """Returns this rank's part of the buffer of whole weights; see [Note: whole]."""
    first = bundle.fused[0][0]
    plan = plan_of(bundle.fused, bundle.format)
    part = bytes_sent(bundle.fused, bundle.format)

    def one(layer: tuple[list[Shards], jax.Array | None]) -> jax.Array:
        shards, amax = layer
        kernels = []
        for mine, layouts in zip(shards, bundle.fused, strict=True):
            mine = gather_stored(mine, layouts)
            rows = [jnp.moveaxis(x, layout.rows, -2) for x, layout in zip(mine, layouts, strict=True)]
            parts = lax.all_gather(jnp.concatenate(rows, axis=-2), first.axes, axis=0)
            kernels += [quantizable(_as_matrices(x, layouts)) for x in whole_kernels(parts, layouts)]
        buffer = pack(kernels, bundle.format, amax, plan)
        padded = jnp.pad(buffer, (0, part * first.ranks - buffer.size))
        return lax.dynamic_slice_in_dim(padded, lax.axis_index(first.axes) * part, part)

    layers = (list(bundle.shards.values()), amax)
    stacked = bundle.shards[next(iter(bundle.shards))][0].ndim > len(first.shape)
    return lax.map(one, layers) if stacked else one(layers)


def _largest_of_each(amax: jax.Array, kernels: Sequence[int]) -> jax.Array:
    """Returns amaxes `(..., kernels)` in which each kernel has the largest amax of its fused weight.

    Args:
        amax: the amaxes, `(..., kernels)`.
        kernels: the number of kernels of each fused weight; in a layer of experts, that of each expert in turn.
    """
    parts = jnp.split(amax, np.cumsum(kernels)[:-1], axis=-1)
    return jnp.concatenate([jnp.broadcast_to(jnp.max(p, -1, keepdims=True), p.shape) for p in parts], axis=-1)


def _over_shards(vector: jax.Array, bundles: Sequence[Bundle]) -> jax.Array:
    """Returns the maximum of each matrix's amax over the axes that shard any of the weights; ranks of other axes have
    the same values.

    If an axis divides experts, its ranks have different experts. Their amaxes are laid side by side in the vector that
    is reduced, so that no maximum is taken over several experts.
    """
    kernels = [layout for bundle in bundles for layouts in bundle.fused for layout in layouts]
    axes = axes_in_use(kernels)
    names = tuple(axis for axis in reversed(jax.sharding.get_abstract_mesh().axis_names) if axis in axes)
    if degrees(names) == 1:
        return vector
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, own in enumerate(own for bundle in bundles for own in bundle.own_axes):
        places[own].append(place)
    parts = []
    for own, members in places.items():
        mine = vector[np.array(members)] if len(places) > 1 else vector
        side_by_side = jnp.zeros((degrees(own), len(members)), vector.dtype)
        parts.append(jnp.ravel(side_by_side.at[lax.axis_index(own)].set(mine)) if own else mine)
    whole = lax.pmax(jnp.concatenate(parts) if len(parts) > 1 else parts[0], names)
    for (own, members), part in zip(
        places.items(), jnp.split(whole, np.cumsum([x.size for x in parts])[:-1]), strict=True
    ):
        mine = jnp.reshape(part, (degrees(own), -1))[lax.axis_index(own)] if own else part
        vector = vector.at[np.array(members)].set(mine) if len(places) > 1 else mine
    return vector


def _own_axes(layout: Layout) -> tuple[str, ...]:
    """Returns the axes whose ranks have different experts."""
    return (*layout.experts.axes, *(layout.tensor.axes if layout.splits_experts else ()))


def _as_matrices(kernel: jax.Array, layouts: Sequence[Layout]) -> jax.Array:
    """Returns a kernel as `(..., matrices, *matrix)`; `matrices` is 1 unless the layer has experts."""
    return jnp.expand_dims(kernel, -3) if len(layouts[0].shape) == 2 else kernel
