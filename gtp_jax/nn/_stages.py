"""Converts modules to stages: the arrays and pure functions that the chain runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..chain import OFFLOADED, Outputs, Remat, Schedule, Stage, is_float, run, with_remat
from ..collectives import Turn, replica_axes, sum_over_replicas, use_turn
from ..hook import with_maxima, without_maxima
from ..mesh import current_view
from ..ops import slotted
from ..variables import leaves_of
from ..weights import (
    CallKeys,
    Gathered,
    Kernels,
    Layers,
    Reduced,
    Scaling,
    Stretch,
    WeightGroup,
    Wire,
    cut_fused,
    divide_gradients,
    forget_after,
    frozen_wires,
    in_param_dtypes,
    in_view,
    moved_weight,
    ranks_spec,
    reduce_gradients,
    stored_gradients,
    straight_through,
    wires_of,
)
from ._attributes import attributes_of, refuse_set_attributes
from ._layer_template import Arrays, LayerTemplate, layer_taken_apart
from ._outputs import outputs_of, write
from ._owners import weight_owners
from ._quantized import quantized_in_scope
from ._set_weights import Held, held_in, refuse_set_weights, with_weights
from ._shared import SharedInputs
from ._weight import Named, Weight

# `Weights` holds the gathered weights of one layer by path, as arrays or codes. `Slots` holds, by path, the arrays that
# receive the gradients of some of these weights.
Weights = dict[Any, Any]
Slots = dict[Any, jax.Array]

# The wires that one layer gathers. `Ready` has, in the same order, the wire that is sent instead of each (see
# `Wire.ready`), or `None` if the wire itself is sent.
Wires = tuple[Wire, ...]
Ready = tuple[Wire | None, ...]

# The weight groups of one layer, by path.
Groups = Mapping[Any, WeightGroup]

# The attribute that names a module in the records of `gtp_jax.chain.offloads_recorded`. It is optional;
# `gtp_jax.inspect` sets it on the layers of stacks.
TRACED_AS = "traced_as"

# One layer's keys of stochastic rounding, by path; its amaxes of delayed scaling, by path; and the arrays in its
# variables that have no gradient.
Constants = tuple[dict[Any, jax.Array], dict[Any, jax.Array], list[Any]]

# The arrays of one layer that are differentiated but not gathered: the floating-point arrays in its variables, except
# frozen ones; and its slots of delayed scaling, by path.
Params = tuple[list[Any], dict[Any, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Link:
    """One module of a chain, and how the chain runs it.

    Attributes:
        module: one layer, or `length` layers whose variables are stacked.
        remat: the policy for what is saved for backward.
        length: the number of layers; `None` for a module that is not stacked.
        each: for each layer of a stack, the arguments that only its call receives; empty if there are none.
    """

    module: nnx.Module
    remat: Remat
    length: int | None = None
    each: Sequence[Named] = ()


@forget_after()
def run_links(links: Sequence[Link], x: Any, schedule: Schedule, shared: SharedInputs) -> Any:
    """Runs modules as one chain, and updates the variables that their calls have written.

    In global view, a gathered weight is a global array that contains the copies of all ranks (see `on_ranks`). Layers
    can thus compute on global arrays, while every rank keeps its own gradient of each weight until the chain reduces
    the gradients.

    Args:
        links: the modules.
        x: the input of the first module.
        schedule: how the chain is run.
        shared: the shared inputs, which every layer of a stack receives.
    """
    stages: list[Stage] = []
    counts: list[int] = []
    for number, link in enumerate(links):
        found = _stages(link, shared, x if number == 0 else None)
        own = [dataclasses.replace(stage, source=getattr(link.module, TRACED_AS, "")) for stage in found]
        stages += own
        counts.append(len(own))
    y, outputs = run(stages, x, schedule, shared.arrays)
    for link, count in zip(links, counts, strict=True):
        own, outputs = outputs[:count], outputs[count:]
        write(link.module, own, stacked=link.length is not None)
    return y


def _stages(link: Link, shared: SharedInputs, x: Any) -> list[Stage]:
    """Returns the stages of a module. A stack has one stage for each stretch of consecutive layers with the same weight
    groups, the same wires and the same arguments of their own (`Link.each`): for example, first layers in high
    precision, layers whose codes have already been gathered, layers whose codes are still to be gathered, and last
    layers in high precision.

    Args:
        link: the module.
        shared: the shared inputs of a stack's layers.
        x: the input of the chain, if the module is the first; otherwise `None`.
    """
    stacked, length = link.length is not None, link.length or 1
    module = quantized_in_scope(link.module, length) if stacked else link.module
    owners = weight_owners(module)
    for owner in owners.values():
        owner.check_mesh()
    shards = {path: owner.shards() for path, owner in owners.items() if not owner.frozen}
    frozen = {path: owner for path, owner in owners.items() if stacked and owner.frozen}
    built = {path: owner.built_group for path, owner in frozen.items()}
    of_frozen = frozen_wires(built, {path: owner.stored() for path, owner in frozen.items()})
    template, arrays = layer_taken_apart(module, owners, stacked)
    amaxes, tops = _scaling(owners)
    if not stacked:
        alone = x is not None and isinstance(module, Weight)  # if so, `x` is the weight's own input
        groups = {path: owner.group_for(x) if alone else owner.group for path, owner in owners.items()}
        keys = {path: owner.keys.next(link=True) for path, owner in owners.items() if owner.keys is not None}
        wires = tuple(_wire(path, owner) for path, owner in sorted(owners.items()))
        params, constants = (arrays.params, tops), (keys, amaxes, arrays.constants)
        return [_stage(template, groups, shards, wires, params, constants, link.remat)]

    by_layers = {path: owner.groups(length) for path, owner in owners.items()}
    first_layer = {path: _of_layer(0, groups) for path, groups in by_layers.items()}
    made = [Stretch(wire, tuple(first_layer[name] for name in wire.members), 0, length) for wire in of_frozen]
    made += [one for owner in owners.values() for one in owner.prepared]
    ends = {end for groups in by_layers.values() for layers, _ in groups for end in layers[:2]}
    ends |= {end for one in made for end in (one.start, one.stop)}
    each = link.each or ((),) * length
    ends |= {layer for layer in range(1, length) if each[layer] != each[layer - 1]}
    bounds = sorted({0, *ends, length})
    keys = _layer_keys(owners, length)
    pieces = _split((shards, (arrays.params, tops), (keys, amaxes, arrays.constants)), bounds[1:-1])
    stages = []
    for start, stop, (own, params, constants) in zip(bounds, bounds[1:], pieces, strict=False):
        groups = {path: _of_layer(start, groups) for path, groups in by_layers.items()}
        wires, first = wires_of(groups, made, shards, own, start, stop)
        stage = _stage(template, groups, own, wires, params, constants, link.remat, shared, each[start])
        stages.append(dataclasses.replace(stage, length=stop - start, stacked=True, first=first))
    return stages


def _wire(path: Any, owner: Weight) -> Wire:
    wire: Any = owner.wire()
    return Kernels(owner.shards(), (path,)) if wire is None else dataclasses.replace(wire, members=(path,))


def _of_layer(layer: int, groups: Sequence[tuple[Layers, WeightGroup]]) -> WeightGroup:
    return next(group for layers, group in groups if layers.start <= layer < layers.stop)


def _stage(
    template: LayerTemplate,
    groups: Groups,
    shards: Any,
    wires: Wires,
    params: Params,
    constants: Constants,
    remat: Remat,
    shared: SharedInputs | None = None,
    named: Named = (),
) -> Stage:
    """Returns the layer as a stage. For layers of a stack, the caller sets `length`, `stacked` and `first`.

    Args:
        template: the template of the layer.
        groups: the weight groups, by path.
        shards: the shards of the weights that are trained, by path.
        wires: the wires that the layer gathers.
        params: the arrays that are differentiated without being gathered.
        constants: the arrays without a gradient.
        remat: the policy for what is saved for backward.
        shared: the shared inputs; `None` if the layer receives none.
        named: further arguments of the layer that are not arrays.
    """

    view = current_view()
    # JAX keeps the functions of a chain after its trace has ended, so they must not hold arrays of the trace
    rest = None if shared is None else shared.without_arrays()

    def apply(
        weights: Weights,
        slots: Slots,
        params: Params,
        x: Any,
        arrays: list[Any],
        constants: Constants,
        turn: Turn,
    ) -> tuple[Any, Outputs]:
        (floats, tops), (keys, amaxes, others) = params, constants
        own = Arrays(floats, others)
        scaling = {path: with_maxima(Scaling(amaxes[path], top)) for path, top in tops.items()}
        values = _values(template, groups, weights, slots, keys, scaling)
        args, kwargs = rest.arguments(arrays) if rest is not None else ((), {})

        def call(layer: Any) -> Any:
            with use_turn(turn if view == "local" else None):
                return layer(x, *args, **kwargs, **dict(named))

        def again(arrays: list[Any]) -> Held:
            layer = with_weights(template.merged(own, values), arrays)
            call(layer)
            return held_in(leaves_of(layer), weights=True)

        layer = template.merged(own, values)
        leaves = leaves_of(layer)
        weights_before, others_before = held_in(leaves, weights=True), held_in(leaves, weights=False)
        attributes = attributes_of(layer)
        y = call(layer)
        leaves = leaves_of(layer)
        refuse_set_weights(weights_before, held_in(leaves, weights=True), again, template.name)
        outputs = outputs_of(others_before, leaves, template.name)
        refuse_set_attributes(attributes, template.name)
        return y, outputs

    def slots(weights: Weights) -> Slots:
        found = {path: group.slot(weights[path]) for path, group in groups.items()}
        return {path: slot for path, slot in found.items() if slot is not None}

    trained = {path: group for path, group in groups.items() if not group.frozen}
    specs = {path: tuple(layout.spec for layout in group.layouts) for path, group in trained.items()}
    ranks = ranks_spec()
    divided = any(group.divided for group in trained.values())
    of_shards: Any = Reduced({}, specs)  # pyright: ignore[reportArgumentType]
    to_shards = functools.partial(_to_shards if view == "global" else divide_gradients, trained)
    first = functools.partial(_reduce, trained)
    if divided or view == "local":
        reduce = in_view(first, lambda gradients: ((ranks, ranks),))
    else:
        reduce = in_view(lambda own: to_shards(first(own)), lambda gradients: ((ranks, ranks),), of_shards)
    divide = in_view(to_shards, lambda reduced: (ranks,), of_shards) if divided else None
    ready = in_view(functools.partial(_ready, groups), lambda wires: (_specs(groups, wires),))
    gather = in_view(
        functools.partial(_gather, groups), lambda shards, wires, ready: (specs, _specs(groups, wires), ranks)
    )
    finish = functools.partial(stored_gradients, trained)
    padded = any(group.cut_late for group in groups.values())
    cut = in_view(functools.partial(_cut, groups), lambda weights: (ranks,)) if padded else None
    return Stage(
        shards,
        wires,
        params,
        prepare=ready,
        gather=gather,
        slots=in_view(slots, lambda weights: (ranks,)),
        reduce=reduce,
        divide=divide,
        finish=finish,
        apply=with_remat(apply, remat),
        constants=constants,
        takes_shared=shared is not None,
        travels=any(group.travels for group in groups.values()),
        offload=remat in OFFLOADED,
        frozen=frozenset(groups) - frozenset(trained),
        name=template.name,
        cut=cut,
    )


def _values(
    template: LayerTemplate,
    groups: Groups,
    weights: Any,
    slots: Slots,
    keys: dict[Any, jax.Array],
    scaling: dict[Any, Scaling],
) -> dict[int, Any]:
    """Returns the values that the weights' variables have in a call, by index among the leaves."""
    found: dict[int, Any] = {}
    for path, (first, *others) in template.places.items():
        weight = slotted(weights[path], slots[path]) if path in slots else weights[path]
        own = CallKeys(keys[path]) if path in keys else None
        found[first] = Gathered(weight, groups[path], own, scaling.get(path))
        found |= dict.fromkeys(others)
    return found


def _specs(groups: Groups, wires: Wires) -> Any:
    return tuple(one.specs(groups) for one in wires)


def _ready(groups: Groups, wires: Wires) -> Ready:
    return tuple(one.ready(groups) for one in wires)


def _gather(groups: Groups, shards: Any, wires: Wires, ready: Ready) -> Weights:
    """Returns the gathered weights of one layer, by path. The result is differentiable with respect to the shards. If a
    weight's group has `cut_late`, the weight still has padding, which `_cut` removes."""
    groups = {path: group.with_padding if group.cut_late else group for path, group in groups.items()}

    def make(wires: Wires) -> Weights:
        return {path: weight for one in wires for path, weight in one.gather(groups).items()}

    sent = tuple(wire if own is None else own for wire, own in zip(wires, ready, strict=True))
    return straight_through(shards, sent, make, lambda path, own: moved_weight(groups[path], own))


def _cut(groups: Groups, weights: Weights) -> Weights:
    """Returns the weights of one layer without padding, given those that `_gather` returns."""
    return {
        path: cut_fused(weight, groups[path].layouts) if groups[path].cut_late and weight is not None else weight
        for path, weight in weights.items()
    }


def _reduce(groups: Groups, gradients: tuple[Any, Slots]) -> Reduced:
    """Sums the gradients of one layer's weights over the ranks; see `reduce_gradients`. The gradient of a weight with a
    slot is that of its slot."""
    of_weights, of_slots = gradients
    return reduce_gradients(groups, {**of_weights, **of_slots})


def _to_shards(groups: Groups, reduced: Reduced) -> Reduced:
    """Returns the gradients of shards for global view. They are also summed over axes that only replicate the
    shards."""
    found = stored_gradients(groups, divide_gradients(groups, reduced))
    specs = {path: tuple(layout.spec for layout in group.layouts) for path, group in groups.items()}
    summed = {path: group for path, group in groups.items() if any(map(replica_axes, specs[path]))}
    found |= in_param_dtypes(summed, {path: found[path] for path in summed})  # the dtype of the sum over replicas
    return Reduced({}, sum_over_replicas(found, specs))


def _layer_keys(owners: dict[Any, Weight], length: int) -> dict[Any, jax.Array]:
    """Returns the stacked keys of all layers, by path of each module that rounds stochastically. A layer's key is the
    module's key with the layer's index added to the first word."""
    found = {}
    for path, owner in owners.items():
        if owner.keys is not None:
            key = owner.keys.next()
            first = key[0] + jnp.arange(length, dtype=jnp.uint32)
            found[path] = jnp.stack([first, jnp.broadcast_to(key[1], (length,))], axis=-1)
    return found


def _scaling(owners: dict[Any, Weight]) -> tuple[dict[Any, jax.Array], dict[Any, jax.Array]]:
    """Returns the amaxes and the slots of delayed scaling, by path of each module that has them."""
    found = {path: without_maxima(owner.scaling) for path, owner in owners.items() if owner.scaling is not None}
    return {path: one.amaxes for path, one in found.items()}, {path: one.slot for path, one in found.items()}


def _split(tree: Any, at: list[int]) -> list[Any]:
    """Splits stacked arrays into stretches of consecutive layers. `at` has the first layer of each stretch, except of
    the first stretch.

    Floating-point arrays are split by `jnp.split` and not by slicing: JAX would pad the gradient of each slice to the
    whole stack, and add all of these.
    """
    if not at:
        return [tree]
    leaves, structure = jax.tree.flatten(tree)
    bounds = list(zip([0, *at], [*at, None], strict=True))
    parts = [jnp.split(a, at) if is_float(a) else [a[start:stop] for start, stop in bounds] for a in leaves]
    return [jax.tree.unflatten(structure, [part[i] for part in parts]) for i in range(len(at) + 1)]
