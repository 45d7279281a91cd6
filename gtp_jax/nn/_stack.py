"""Modules joined into a chain: `Stack`, layers alike, and `run_chain`, modules of any kind in a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from ..chain import Link, Remat, Schedule, run, with_remat
from ..collectives import Packed, gather_packed
from ._layer import Layer, layout_of
from ._weight import scatter, weight_owners


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
            The first layers' may have been gathered already.

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
        self.length = length
        self.schedule = Schedule() if schedule is None else schedule
        self.remat: Remat = remat
        self.sequence_parallel = sequence_parallel
        self.packed: tuple[Packed, ...] = nnx.data(())

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


class _Row(Layer):
    """Modules in a row, so that a chain of several can be called like one module."""

    def __init__(self, modules: tuple[Layer, ...], schedule: Schedule | None, remat: Remat | None) -> None:
        stacks = [m for m in modules if isinstance(m, Stack)]
        self.links = nnx.List(modules)
        self.schedule = schedule or (stacks[0].schedule if stacks else Schedule())
        others: Remat = stacks[0].remat if stacks else "matmuls"
        self.remat: tuple[Remat, ...] = tuple(remat or (m.remat if isinstance(m, Stack) else others) for m in modules)
        self.sequence_parallel = False

    def local(self, x: Any) -> Any:
        found = [_links(module, remat) for module, remat in zip(self.links, self.remat, strict=True)]
        return run([link for links in found for link in links], x, self.schedule)

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        first: Layer = self.links[0]
        last: Layer = self.links[-1]
        return first.partitions(ndim)[0], last.partitions(3)[1]


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
    """A module as the chain sees it; two stretches if the codes of only a stack's first layers are held."""
    link = _link(module, remat)
    held = [one for one in link.sent[0] if one.gathered]
    count = held[0].buffer.shape[0] if held else 0
    if count in (0, link.length):
        return [link]
    sizes = (count, link.length - count)
    # by `split` and not by slices, whose gradients would each be padded to the whole stack and added up
    leaves, tree = jax.tree.flatten((link.slices, link.sent[1], link.whole))
    parts = zip(*(lax.split(leaf, sizes) for leaf in leaves), strict=True)
    packed = (tuple(held), tuple(one for one in link.sent[0] if not one.gathered))
    found = []
    for part, one, length in zip(parts, packed, sizes, strict=True):
        slices, others, whole = jax.tree.unflatten(tree, part)
        found.append(dataclasses.replace(link, slices=slices, sent=(one, others), whole=whole, length=length))
    return found


def _link(module: Layer, remat: Remat) -> Link:
    """A module as the chain sees it: slices, gather, scatter, and one layer's function."""
    stack = module if isinstance(module, Stack) else None
    layer = stack.layers if stack is not None else module
    owners = weight_owners(layer)
    graph, state = nnx.split(layer)
    # beside the variables, arrays of quantized slices, which no layer looks at once its weights are gathered
    leaves, tree = jax.tree.flatten(state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    is_whole = [isinstance(v, nnx.Variable) and layout_of(v) is None for v in leaves]

    def apply(weights: dict[Any, jax.Array], whole: list[jax.Array], x: Any) -> Any:
        values = iter(whole)
        put = [v.replace(next(values)) if whole else v for v, whole in zip(leaves, is_whole, strict=True)]
        one = nnx.merge(graph, jax.tree.unflatten(tree, put))
        for path, owner in weight_owners(one).items():
            owner.whole_weight = weights[path]
        return one(x)

    packed: tuple[Packed, ...] = stack.packed if stack is not None else ()
    bundled = {path for one in packed for path in one.members}

    def gather(sent: tuple[tuple[Packed, ...], dict[Any, Any]]) -> dict[Any, jax.Array]:
        packed, others = sent
        weights = {path: owners[path].gather(own) for path, own in others.items()}
        for one in packed:
            members = [owners[path] for path in one.members]
            found = gather_packed(one, [member.layouts for member in members], members[0].dtype)
            weights.update(zip(one.members, found, strict=True))
        return weights

    return Link(
        slices={path: owner.slices() for path, owner in owners.items()},
        whole=[v.get_value() for v, whole in zip(leaves, is_whole, strict=True) if whole],
        gather=gather,
        scatter=lambda gradients: scatter(owners, gradients),
        apply=with_remat(apply, remat),
        length=1 if stack is None else stack.length,
        stacked=stack is not None,
        sent=(packed, {path: owner.sent() for path, owner in owners.items() if path not in bundled}),
    )
