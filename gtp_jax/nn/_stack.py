"""Modules joined into a chain: `Stack`, layers alike, and `run_chain`, modules of any kind in a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ..chain import Link, Remat, Schedule, run, with_remat
from ..collectives import Packed, gather_packed
from ..ops import CodedWeight
from ._layer import Layer, layout_of
from ._rounding import CallKeys, key_for
from ._weight import WeightOwner, scatter, weight_owners

# Of one layer, by path: gathered weights, arrays or codes; and where the gradients of the latter go.
Weights = dict[Any, Any]
Slots = dict[Any, jax.Array]


class Stack(Layer):
    """`length` layers alike, run as a chain: each layer's weights are gathered under the layer ahead of it.

    Parameters are stored stacked: one array a weight, with a leading dimension of `length`.

    Args:
        factory: makes one layer, called as `factory(rngs=...)`. The layer maps activations to activations of the same
            shape, dtype and partition.
        length: number of layers.
        schedule: when things happen; see `Schedule`.
        remat: what is kept for backward; see `with_remat`.
        sequence_parallel: whether the activation that is handed on is cut along the sequence over tp.
        rngs: split, one stream a layer.

    Attributes:
        packed: what is gathered in place of the layers' slices: buffers of quantized weights; none without a recipe.
            Of all layers; and, ahead of them, of those whose codes have been gathered already.
        kept: layers, from the first and up to the last, that stay in high precision all the same.
        keys: of its calls' stochastic rounding; `None` where nothing is rounded so.

    Raises:
        ValueError: if `length` is less than 1, `remat` is not a known policy, or a layer holds a `Stack` of its own.
    """

    def __init__(
        self,
        factory: Callable[..., nnx.Module],
        length: int,
        *,
        schedule: Schedule | None = None,
        remat: Remat = "matmuls",
        sequence_parallel: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        if length < 1:
            raise ValueError(f"`length` is {length}; a stack has at least one layer.")
        with_remat(lambda x: x, remat)
        _check_schedule(schedule)
        super().__init__()
        self.length = length
        self.schedule = Schedule() if schedule is None else schedule
        self.remat: Remat = remat
        self.sequence_parallel = sequence_parallel
        self.packed: tuple[Packed, ...] = nnx.data(())
        self.kept: tuple[int, int] = (0, 0)
        self.keys: CallKeys | None = nnx.data(None)

        @nnx.split_rngs(splits=length)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        def make(rngs: nnx.Rngs) -> nnx.Module:
            return factory(rngs=rngs)

        self.layers = make(rngs)
        _refuse_inner_stacks(self.layers)

    def local(self, x: Any) -> Any:
        return run(_links(self, self.remat), x, self.schedule)


def run_chain(x: Any, *modules: Layer, schedule: Schedule | None = None, remat: Remat | None = None) -> Any:
    """Calls modules one after the other as one chain, so that the gathers between them are hidden too.

    `run_chain(tokens, embed, blocks, head)` equals `head(blocks(embed(tokens)))`; but the first block's weights are
    gathered under the embedding, the head's under the last block, and likewise in backward.

    Args:
        x: the first module's input.
        modules: `Stack`s and other modules.
        schedule: that of the `Stack`s by default.
        remat: for all modules; by default each `Stack` has its own, and the others that of the first.

    Raises:
        ValueError: without modules; if `Stack`s differ in their schedules and none is given; if a module holds a
            `Stack`.
        TypeError: if one is not a `gtp_jax.nn.Layer`.
    """
    if not modules:
        raise ValueError("`run_chain` joins one module or more; it got none.")
    for number, module in enumerate(modules):
        if not isinstance(module, Layer):
            raise TypeError(
                f"`run_chain` joins modules of gtp_jax; number {number} is a {type(module).__name__}. Derive it from "
                "`gtp_jax.nn.Layer`, with the call as its method `local`."
            )
        if not isinstance(module, Stack):
            _refuse_inner_stacks(module)
    _check_schedule(schedule)
    schedules = {m.schedule for m in modules if isinstance(m, Stack)}
    if schedule is None and len(schedules) > 1:
        raise ValueError(
            f"the stacks of a chain have different schedules: {', '.join(map(str, schedules))}. Pass `schedule` to "
            "`run_chain`."
        )
    return _Row(modules, schedule, remat)(x)


def stacks_of(module: nnx.Module) -> dict[tuple[Any, ...], Stack]:
    """The stacks within a module, itself included, by path."""
    return {path: m for path, m in nnx.iter_modules(module) if isinstance(m, Stack)}


class _Row(Layer):
    """Modules in a row, so that a chain of several can be called like one module."""

    def __init__(self, modules: tuple[Layer, ...], schedule: Schedule | None, remat: Remat | None) -> None:
        stacks = [m for m in modules if isinstance(m, Stack)]
        super().__init__()
        self.links = nnx.List(modules)
        self._roles = modules[0].roles
        self.schedule = schedule or (stacks[0].schedule if stacks else Schedule())
        others: Remat = stacks[0].remat if stacks else "matmuls"
        self.remat: tuple[Remat, ...] = tuple(remat or (m.remat if isinstance(m, Stack) else others) for m in modules)
        self.sequence_parallel = False

    def local(self, x: Any) -> Any:
        links = [part for module, remat in zip(self.links, self.remat, strict=True) for part in _links(module, remat)]
        return run(links, x, self.schedule)

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        first: Layer = self.links[0]
        last: Layer = self.links[-1]
        return first.partitions(ndim)[0], last.partitions(3)[1]

    def from_global(self, x: Any) -> Any:
        return self.links[0].from_global(x)

    def to_global(self, y: Any) -> Any:
        return self.links[-1].to_global(y)


def _check_schedule(schedule: Any) -> None:
    if schedule is not None and not isinstance(schedule, Schedule):
        raise TypeError(f"`schedule` is {schedule!r}; it is a `gtp_jax.Schedule`.")


def _refuse_inner_stacks(module: nnx.Module) -> None:
    if any(isinstance(inner, Stack) for _, inner in nnx.iter_modules(module)):
        raise ValueError(
            f"{type(module).__name__} holds a `Stack`, which cannot be a part of another chain's layer. Put stacks "
            "side by side: `run_chain(x, stack, other_stack)`."
        )


def _links(module: Layer, remat: Remat) -> list[Link]:
    """A module as the chain sees it; a stack in stretches: in high precision, of codes held, of codes to be gathered,
    and in high precision again."""
    if not isinstance(module, Stack):
        owners = weight_owners(module)
        keys = {path: owner.keys.next(link=True) for path, owner in owners.items() if owner.keys is not None}
        sent = ((), {path: owner.sent() for path, owner in owners.items()})
        template = _Template(module)
        return [template.link(template.slices, sent, template.whole, keys, remat)]

    template, length = _Template(module.layers), module.length
    high = _Template(_in_high_precision(module.layers)) if any(module.kept) else template
    slices, bundled = template.slices, {path for one in module.packed for path in one.members}

    def unbundled(slices: dict[Any, Any]) -> dict[Any, Any]:
        return {path: own for path, own in slices.items() if path not in bundled}

    held = tuple(one for one in module.packed if one.gathered)
    packed = tuple(one for one in module.packed if not one.gathered)
    keys = {} if module.keys is None else _layer_keys(module.keys.next(), template.owners, length)
    first, last = module.kept[0], length - module.kept[1]
    ahead = first + (held[0].buffer.shape[0] if held else 0)
    bounds = sorted({0, first, ahead, last, length})
    links = []
    parts = _split((slices, template.whole, keys), bounds[1:-1])
    for start, stop, (own, whole, fixed) in zip(bounds, bounds[1:], parts, strict=False):
        if not first <= start < last:
            chosen, sent, at = high, ((), slices), start
        elif start < ahead:
            chosen, sent, at = template, (held, unbundled(own)), 0
        else:
            chosen, sent, at = template, (packed, unbundled(slices)), start
        link = chosen.link(own, sent, whole, fixed, remat)
        links.append(dataclasses.replace(link, length=stop - start, stacked=True, first=at))
    return links


def _in_high_precision(layer: nnx.Module) -> nnx.Module:
    """The layer without what a recipe does to its matmuls and gradients."""
    layer = nnx.clone(layer)
    for owner in weight_owners(layer).values():
        owner.operands = None
        owner.reduction = None
    return layer


class _Template:
    """One layer's modules, into which a chain puts the values of each layer in turn.

    Attributes:
        owners: modules with weights that are gathered, by path.
        slices: of these weights, by path.
        whole: values of the parameters that are not cut over gtp.
    """

    def __init__(self, layer: nnx.Module) -> None:
        self.owners = weight_owners(layer)
        self.slices = {path: owner.slices() for path, owner in self.owners.items()}
        self.graph, state = nnx.split(layer)
        # beside the variables, arrays of quantized slices, which no layer looks at once its weights are gathered
        self.leaves, self.tree = jax.tree.flatten(state, is_leaf=lambda v: isinstance(v, nnx.Variable))
        self.is_whole = [isinstance(v, nnx.Variable) and layout_of(v) is None for v in self.leaves]
        self.whole = [v.get_value() for v, whole in zip(self.leaves, self.is_whole, strict=True) if whole]

    def link(self, slices: Any, sent: Any, whole: Any, keys: Any, remat: Remat) -> Link:
        """The layer as a link, not stacked."""

        def apply(weights: Weights, slots: Slots, whole: list[jax.Array], x: Any, keys: dict[Any, jax.Array]) -> Any:
            values = iter(whole)
            put = [v.replace(next(values)) if w else v for v, w in zip(self.leaves, self.is_whole, strict=True)]
            one = nnx.merge(self.graph, jax.tree.unflatten(self.tree, put))
            for path, owner in weight_owners(one).items():
                weight = weights[path]
                owner.whole_weight = CodedWeight(weight, slots[path]) if path in slots else weight
                owner.keys = nnx.data(CallKeys(keys[path]) if path in keys else None)
            return one(x)

        def slots() -> Slots:
            return {path: owner.slot() for path, owner in self.owners.items() if path in coded}

        def to_slices(gradients: tuple[Any, Slots]) -> dict[Any, Any]:
            of_weights, of_slots = gradients
            return scatter(self.owners, {**of_weights, **of_slots})

        coded = {path for path, owner in self.owners.items() if owner.takes_codes(owner.operands)}
        apply = with_remat(apply, remat)
        return Link(slices, sent, whole, gather=self.gather, slots=slots, scatter=to_slices, apply=apply, fixed=keys)

    def gather(self, sent: tuple[tuple[Packed, ...], dict[Any, Any]]) -> Weights:
        """The weights of one layer, by path."""
        packed, others = sent
        weights = {path: self.owners[path].gather(own) for path, own in others.items()}
        for one in packed:
            members = [self.owners[path] for path in one.members]
            if len(members) == 1:
                found: Any = [members[0].gather(one)]
            else:
                found = gather_packed(one, [member.layouts for member in members], members[0].dtype)
            weights.update(zip(one.members, found, strict=True))
        return weights


def _layer_keys(key: jax.Array, owners: dict[Any, WeightOwner], length: int) -> dict[Any, jax.Array]:
    """Of each module that rounds stochastically, a key for each layer: the first word counts layers."""
    first = key[0] + jnp.arange(length, dtype=jnp.uint32)
    chosen = [path for path, owner in owners.items() if owner.operands is not None and owner.operands.stochastic]
    return {path: jnp.stack([first, jnp.broadcast_to(key_for(key, path)[1], (length,))], axis=-1) for path in chosen}


def _split(tree: Any, at: list[int]) -> list[Any]:
    """Stacked arrays, cut between layers.

    By `split` and not by slices, whose gradients would each be padded to the whole stack and added up.
    """
    leaves, structure = jax.tree.flatten(tree)
    parts = [jnp.split(leaf, at) for leaf in leaves]
    return [jax.tree.unflatten(structure, [part[i] for part in parts]) for i in range(len(at) + 1)]
