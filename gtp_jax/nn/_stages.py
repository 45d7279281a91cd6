"""Modules as the chain sees them: stages of arrays and pure functions."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..chain import Outputs, Remat, Schedule, Stage, run, with_remat
from ..collectives import Packed, StoredCodes, Turn, codes_specs, replica_axes, sum_over_replicas, use_turn
from ..mesh import current_view
from ..ops import slotted
from ..weights import (
    CallKeys,
    Gathered,
    Layers,
    WeightGroup,
    bundle_frozen,
    forget_after,
    gather,
    gather_members,
    in_param_dtypes,
    prepare,
    reduce_gradients,
    refuse_gradient,
    stored_gradients,
    straight_through,
)
from ._frozen import Frozen
from ._layer import Leaf, layout_of, value_of
from ._outputs import is_float, outputs_of, values_of, variables_of, write
from ._quantized import quantized_in_scope
from ._ranks import by_rank, on_ranks, ranks_spec
from ._shared import SharedInputs
from ._weight import Weight, kernel_places, weight_owners

# One layer's gathered weights by path, arrays or codes; and the arrays that receive the gradients of some of them.
Weights = dict[Any, Any]
Slots = dict[Any, jax.Array]

# What one layer gathers: buffers of codes; by path shards, or codes of its own. And what is sent in place of shards.
Inputs = tuple[tuple[Packed | StoredCodes, ...], dict[Any, Any]]
Prepared = dict[Any, jax.Array]

# What is decided about one layer's weights, by path.
Groups = Mapping[Any, WeightGroup]

# One layer's keys of stochastic rounding by path, and the arrays of its variables that have no gradient.
Constants = tuple[dict[Any, jax.Array], list[Any]]


@dataclasses.dataclass(frozen=True)
class Part:
    """A module of a chain.

    Attributes:
        module: one layer; or `length` layers, whose variables are stacked.
        remat: what is saved for backward.
        length: number of layers; `None` of a module that is not stacked.
    """

    module: nnx.Module
    remat: Remat
    length: int | None = None


@forget_after()
def run_parts(
    parts: Sequence[Part], x: Any, schedule: Schedule, shared: SharedInputs, *, declared: bool = False
) -> Any:
    """Runs modules as one chain, and writes to their variables what their calls wrote.

    In global view what a chain has gathered is a global array of every rank's copy (see `_ranks`), so that layers
    compute on global arrays, and gradients of weights stay one a rank until the chain reduces them.

    Args:
        parts: the modules.
        x: the first one's input.
        schedule: when things happen.
        shared: for every layer of the stacked ones.
    """
    stages: list[Stage] = []
    counts: list[int] = []
    for part in parts:
        own = _stages(part, shared)
        stages += own
        counts.append(len(own))
    y, outputs = run(stages, x, schedule, shared.arrays)
    for part, count in zip(parts, counts, strict=True):
        own, outputs = outputs[:count], outputs[count:]
        write(part.module, own, stacked=part.length is not None)
    return y


def _stages(part: Part, shared: SharedInputs) -> list[Stage]:
    """Returns the stages of a module: of a stack one for each stretch of layers: in high precision, with codes gathered
    already, with codes to be gathered, and in high precision again."""
    stacked, length = part.length is not None, part.length or 1
    module = quantized_in_scope(part.module, length) if stacked else part.module
    template = _Template(module, stacked)
    if not stacked:
        groups = {path: owner.group for path, owner in template.owners.items()}
        keys = {path: owner.keys.next(link=True) for path, owner in template.owners.items() if owner.keys is not None}
        sent = {path: _sent(owner) for path, owner in template.owners.items()}
        constants = keys, template.constants
        return [template.stage(groups, template.shards, ((), sent), template.params, constants, part.remat)]

    by_layers = {path: owner.groups(length) for path, owner in template.owners.items()}
    buffers = [one for owner in template.owners.values() for one in owner.packed]
    bundled = {path for one in buffers for path in one.members}

    def gathered(own: Any, start: int, stop: int, but: Collection[Any] = ()) -> Any:
        """Returns what is gathered of these layers: `own`, or what takes its place, but for some paths."""
        joined = {path: template.owners[path].joined(start, stop) for path in template.shards if path not in but}
        return {path: own[path] if shards is None else shards for path, shards in joined.items()}

    def with_frozen(packed: tuple[Any, ...], others: dict[Any, Any], at: int, start: int, stop: int) -> Any:
        """Returns what is gathered of these layers: `packed` and `others`, whose first layer is `start`, in which it
        has the index `at`; and what is frozen."""
        codes, arrays = template.kept
        if at != start:
            codes, arrays = jax.tree.map(lambda a: a[start:stop], (codes, arrays))
        return (*codes, *packed), {**others, **arrays}

    some_joined = any(owner.joined() is not None for owner in template.owners.values())
    pregathered = tuple(one for one in buffers if one.gathered)
    packed = tuple(one for one in buffers if not one.gathered)
    quantized = [layers for groups in by_layers.values() for layers, group in groups if group.wire and not group.frozen]
    first = min((layers.start for layers in quantized), default=0)
    last = max((layers.stop for layers in quantized), default=0)
    ahead = first + (pregathered[0].buffer.shape[0] if pregathered else 0)
    ends = {end for groups in by_layers.values() for layers, _ in groups for end in layers[:2]}
    ends |= {start for owner in template.owners.values() for start in owner.starts}
    bounds = sorted({0, *ends, ahead, length})
    keys = _layer_keys(template.owners, length)
    pieces = _split((template.shards, template.params, (keys, template.constants)), bounds[1:-1])
    stages = []
    for start, stop, (own, params, constants) in zip(bounds, bounds[1:], pieces, strict=False):
        groups = {path: _of_layer(start, groups) for path, groups in by_layers.items()}
        if not first <= start < last:
            sent, at = (((), gathered(own, start, stop)), 0) if some_joined else (((), template.shards), start)
        elif start < ahead:
            sent, at = (pregathered, gathered(own, start, stop, bundled)), 0
        else:
            sent, at = (packed, gathered(template.shards, 0, length, bundled)), start
        inputs = with_frozen(*sent, at, start, stop)
        stage = template.stage(groups, own, inputs, params, constants, part.remat, shared)
        stages.append(dataclasses.replace(stage, length=stop - start, stacked=True, first=at))
    return stages


def _of_layer(layer: int, groups: Sequence[tuple[Layers, WeightGroup]]) -> WeightGroup:
    return next(group for layers, group in groups if layers.start <= layer < layers.stop)


class _Template:
    """One layer's modules, into which a chain puts the values of each layer in turn.

    Attributes:
        owners: modules with weights that the chain gathers, by path.
        places: of their kernels among the layer's leaves.
        shards: of those that are trained, by path.
        kept: what is gathered of the others of a stack, see `bundle_frozen`.
        params: the floats of the other variables, but for those that are frozen.
        constants: the rest of them: integers, keys, what is frozen.
    """

    def __init__(self, layer: nnx.Module, stacked: bool) -> None:
        self.owners = weight_owners(layer)
        for owner in self.owners.values():
            owner.check_mesh()
        self.name = type(layer).__name__
        self.graph, state = nnx.split(layer)
        self.leaves, self.tree = jax.tree.flatten(state, is_leaf=lambda v: isinstance(v, nnx.Variable))
        self.places = kernel_places(self.graph, self.leaves, self.tree)
        self.is_put = [layout_of(v) is None for v in self.leaves]
        self.metadata = [_of_one_layer(v) if stacked else {} for v in self.leaves]
        self.shards = {path: owner.shards() for path, owner in self.owners.items() if not owner.frozen}
        frozen = {path: owner for path, owner in self.owners.items() if stacked and owner.frozen}
        groups = {path: owner.built_group for path, owner in frozen.items()}
        self.kept = bundle_frozen(groups, {path: owner.stored() for path, owner in frozen.items()})
        put = [v for v, is_put in zip(self.leaves, self.is_put, strict=True) if is_put]
        values = [refuse_gradient(value_of(v)) if isinstance(v, Frozen) else value_of(v) for v in put]
        arrays, self.values = jax.tree.flatten(values)
        trained = [not isinstance(v, Frozen) for v in put for _ in jax.tree.leaves(value_of(v))]
        self.is_float = [own and is_float(a) for a, own in zip(arrays, trained, strict=True)]
        self.params = [a for a, chosen in zip(arrays, self.is_float, strict=True) if chosen]
        self.constants = [a for a, chosen in zip(arrays, self.is_float, strict=True) if not chosen]

    def stage(
        self,
        groups: Groups,
        shards: Any,
        gather_inputs: Any,
        params: Any,
        constants: Any,
        remat: Remat,
        shared: SharedInputs | None = None,
    ) -> Stage:
        """Returns the layer as a stage, not stacked."""

        view = current_view()
        # what JAX keeps of a chain when its trace is over must not hold the trace's arrays
        template = self._without_arrays()
        rest = None if shared is None else shared.without_arrays()

        def apply(
            weights: Weights,
            slots: Slots,
            params: list[Any],
            x: Any,
            arrays: list[Any],
            constants: Constants,
            turn: Turn,
        ) -> tuple[Any, Outputs]:
            keys, others = constants
            layer = template.merged(params, others, template._values(groups, weights, slots, keys))
            before = values_of(variables_of(layer))
            args, kwargs = rest.arguments(arrays) if rest is not None else ((), {})
            with use_turn(turn if view == "local" else None):
                y = layer(x, *args, **kwargs)  # pyright: ignore[reportCallIssue]
            return y, outputs_of(before, variables_of(layer), template.name)

        def slots(weights: Weights) -> Slots:
            found = {path: group.slot(weights[path]) for path, group in groups.items()}
            return {path: slot for path, slot in found.items() if slot is not None}

        trained = {path: group for path, group in groups.items() if not group.frozen}

        def reduce(gradients: tuple[Any, Slots]) -> dict[Any, Any]:
            of_weights, of_slots = gradients
            return reduce_gradients(trained, {**of_weights, **of_slots})

        finish = functools.partial(stored_gradients, trained)
        ahead, gather, reduced = functools.partial(_prepare, groups), functools.partial(_gather, groups), reduce
        if current_view() == "global":  # in which `finish` has nothing left to do
            joined = {path for path, owner in self.owners.items() if owner.joined() is not None}
            ahead, gather, slots, reduced = _in_global_view(
                groups, joined, ahead, gather, slots, lambda own: finish(reduce(own))
            )
        return Stage(
            shards,
            gather_inputs,
            params,
            prepare=ahead,
            gather=gather,
            slots=slots,
            reduce=reduced,
            finish=finish,
            apply=with_remat(apply, remat),
            constants=constants,
            takes_shared=shared is not None,
            travels=any(group.travels for group in groups.values()),
            frozen=frozenset(groups) - frozenset(trained),
        )

    def _without_arrays(self) -> _Template:
        template = copy.copy(self)
        template.leaves = [v.replace(None) if isinstance(v, nnx.Variable) else None for v in self.leaves]
        template.owners, template.shards, template.kept = {}, {}, ((), {})
        template.params, template.constants = [], []
        return template

    def merged(self, params: list[Any], constants: list[Any], weights: Mapping[int, Any]) -> Any:
        """Returns the layer with these values in its variables; those of weights by their place among the leaves."""
        floats, others = iter(params), iter(constants)
        arrays = [next(floats) if chosen else next(others) for chosen in self.is_float]
        values = iter(jax.tree.unflatten(self.values, arrays))
        put = []
        for place, (v, is_put, metadata) in enumerate(zip(self.leaves, self.is_put, self.metadata, strict=True)):
            if is_put:
                value = next(values)
                v = v.replace(value, **metadata) if isinstance(v, nnx.Variable) else value
            elif place in weights:
                v = v.replace(weights[place], **metadata)
            put.append(v)
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, put))

    def _values(self, groups: Groups, weights: Any, slots: Slots, keys: dict[Any, jax.Array]) -> dict[int, Any]:
        """Returns what the weights' variables hold in a call, by place."""
        found: dict[int, Any] = {}
        for path, (first, *others) in self.places.items():
            weight = slotted(weights[path], slots[path]) if path in slots else weights[path]
            found[first] = Gathered(weight, groups[path], CallKeys(keys[path]) if path in keys else None)
            found |= dict.fromkeys(others)
        return found


def _prepare(groups: Groups, inputs: Inputs) -> Prepared:
    """Returns what is sent in the place of shards that are to be cast, by path."""
    found = {path: prepare(groups[path], own) for path, own in inputs[1].items()}
    return {path: own for path, own in found.items() if own is not None}


def _gather(groups: Groups, shards: Any, inputs: Inputs, prepared: Prepared) -> Weights:
    """Gathers the weights of one layer, by path, differentiable in the shards."""

    def make(inputs: Inputs) -> Weights:
        packed, others = inputs
        weights = {path: gather(groups[path], own) for path, own in others.items()}
        for one in packed:
            weights |= gather_members(groups, one)
        return weights

    packed, others = inputs
    return straight_through(groups, shards, (packed, {**others, **prepared}), make)


def _in_global_view(
    groups: Groups,
    joined: Collection[Any],
    prepare: Callable[..., Prepared],
    gather: Callable[..., Weights],
    slots: Callable[..., Slots],
    to_shards: Callable[..., Any],
) -> tuple[Callable[..., Prepared], Callable[..., Weights], Callable[..., Slots], Callable[..., Any]]:
    """Returns the four, on global arrays: what is prepared, weights, slots and their gradients are every rank's own.

    Args:
        groups: by path.
        joined: paths of which shards are gathered, joined from what ranks store.
        prepare: in local view, and so are the others.
        gather: of shards, of what stands in their place, and of what is prepared.
        slots: of gathered weights.
        to_shards: from gradients of gathered weights.
    """
    ranks = ranks_spec()
    specs = {path: tuple(layout.spec for layout in group.layouts) for path, group in groups.items()}
    trained = {path: own for path, own in specs.items() if not groups[path].frozen}

    def sent_spec(own: Any, path: Any = ()) -> Any:
        if isinstance(own, StoredCodes):
            members = [groups[path or name] for name in own.members]
            kernels = [tuple(codes_specs(one, own.format) for one in member.layouts) for member in members]
            return StoredCodes(tuple(kernels), own.members)
        if isinstance(own, Packed):
            return ranks
        return tuple(one.of_shards.spec for one in groups[path].layouts) if path in joined else specs[path]

    def inputs_spec(inputs: Inputs) -> Any:
        packed, others = inputs
        return tuple(map(sent_spec, packed)), {path: sent_spec(own, path) for path, own in others.items()}

    def prepare_globally(inputs: Inputs) -> Prepared:
        return on_ranks(prepare, (inputs_spec(inputs),), ranks)(inputs)

    def gather_globally(shards: Any, inputs: Inputs, prepared: Prepared) -> Weights:
        into = trained, inputs_spec(inputs), ranks
        return on_ranks(lambda *own: by_rank(gather(*own)), into, ranks)(shards, inputs, prepared)

    summed = {path: groups[path] for path, own in trained.items() if any(map(replica_axes, own))}

    def to_summed_shards(gradients: tuple[Any, Slots]) -> dict[Any, Any]:
        found = to_shards(gradients)  # a sum over replicas is taken in the parameters' dtypes
        found |= in_param_dtypes(summed, {path: found[path] for path in summed})
        return sum_over_replicas(found, trained)

    def to_global_shards(gradients: tuple[Any, Slots]) -> dict[Any, Any]:
        return on_ranks(to_summed_shards, ((ranks, ranks),), trained)(gradients)

    return prepare_globally, gather_globally, on_ranks(slots, (ranks,), ranks), to_global_shards


def _sent(owner: Weight) -> Any:
    """Returns what a rank sends in a gather of a module's weight."""
    if (
        owner.frozen
        or current_view() != "global"
        or owner.group.wire is None
        or owner.packed
        or owner.joined() is not None
    ):
        return owner.sent()
    specs = tuple(layout.spec for layout in owner.layouts)
    return on_ranks(owner.sent_of, (specs,), ranks_spec())(owner.shards())


def _of_one_layer(leaf: Leaf) -> dict[str, Any]:
    """Returns the metadata of one layer's variable that differ from the stacked one's."""
    sharding = leaf.get_metadata().get("out_sharding") if isinstance(leaf, nnx.Variable) else None
    return {"out_sharding": tuple(sharding)[1:]} if sharding else {}


def _layer_keys(owners: dict[Any, Weight], length: int) -> dict[Any, jax.Array]:
    """Returns a key for each layer, by path of each module that rounds stochastically: the first word counts layers."""
    found = {}
    for path, owner in owners.items():
        if owner.keys is not None:
            key = owner.keys.next()
            first = key[0] + jnp.arange(length, dtype=jnp.uint32)
            found[path] = jnp.stack([first, jnp.broadcast_to(key[1], (length,))], axis=-1)
    return found


def _split(tree: Any, at: list[int]) -> list[Any]:
    """Splits stacked arrays between layers.

    Floats by `jnp.split`, because the gradients of slices would each be padded to the whole stack and added up.
    """
    if not at:
        return [tree]
    leaves, structure = jax.tree.flatten(tree)
    bounds = list(zip([0, *at], [*at, None], strict=True))
    parts = [jnp.split(a, at) if is_float(a) else [a[start:stop] for start, stop in bounds] for a in leaves]
    return [jax.tree.unflatten(structure, [part[i] for part in parts]) for i in range(len(at) + 1)]
