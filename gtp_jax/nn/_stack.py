"""Modules joined into a chain: `Stack`, layers alike, and `run_chain`, modules of any kind in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from ..chain import Link, Remat, Schedule, run, with_remat
from ._layer import Layer, layout_of
from ._weight import WeightOwner


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

    Raises:
        ValueError: if `length` is less than 1, or `remat` is not a known policy.
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
        self.length = length
        self.schedule = Schedule() if schedule is None else schedule
        self.remat: Remat = remat
        self.sequence_parallel = sequence_parallel

        @nnx.split_rngs(splits=length)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        def make(rngs: nnx.Rngs) -> nnx.Module:
            return factory(rngs=rngs)

        self.layers = make(rngs)

    def local(self, x: Any) -> Any:
        return run([_link(self, self.remat)], x, self.schedule)


def run_chain(x: Any, *modules: Layer, schedule: Schedule | None = None, remat: Remat | None = None) -> Any:
    """Calls modules one after the other as one chain, so that the gathers between them are hidden too.

    `run_chain(tokens, embed, blocks, head)` equals `head(blocks(embed(tokens)))`; but the first block's weights are
    gathered under the embedding, the head's under the last block, and likewise in backward.

    Args:
        x: the first module's input.
        modules: `Stack`s and other modules.
        schedule: that of the first `Stack` by default.
        remat: likewise.

    Raises:
        ValueError: without modules.
    """
    if not modules:
        raise ValueError("`run_chain` joins one module or more; it got none.")
    return _Row(modules, schedule, remat)(x)


class _Row(Layer):
    """Modules in a row, so that a chain of several can be called like one module."""

    def __init__(self, modules: tuple[Layer, ...], schedule: Schedule | None, remat: Remat | None) -> None:
        stacks = [m for m in modules if isinstance(m, Stack)]
        self.links = nnx.List(modules)
        self.schedule = schedule or (stacks[0].schedule if stacks else Schedule())
        self.remat: Remat = remat or (stacks[0].remat if stacks else "matmuls")
        self.sequence_parallel = False

    def local(self, x: Any) -> Any:
        return run([_link(module, self.remat) for module in self.links], x, self.schedule)

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        first: Layer = self.links[0]
        last: Layer = self.links[-1]
        return first.partitions(ndim)[0], last.partitions(3)[1]


def _link(module: Layer, remat: Remat) -> Link:
    """A module as the chain sees it: slices, gather, scatter, and one layer's function."""
    stack = module if isinstance(module, Stack) else None
    layer = stack.layers if stack is not None else module
    owners = {path: m for path, m in nnx.iter_modules(layer) if isinstance(m, WeightOwner)}
    graph, state = nnx.split(layer)
    variables, tree = jax.tree.flatten(state, is_leaf=lambda v: isinstance(v, nnx.Variable))

    def apply(weights: dict[Any, jax.Array], whole: list[jax.Array], x: Any) -> Any:
        values = iter(whole)
        put = [v if layout_of(v) is not None else v.replace(next(values)) for v in variables]
        one = nnx.merge(graph, jax.tree.unflatten(tree, put))
        for path, owner in nnx.iter_modules(one):
            if isinstance(owner, WeightOwner):
                owner.whole_weight = weights[path]
        return one(x)

    return Link(
        slices={path: owner.slices() for path, owner in owners.items()},
        whole=[v.get_value() for v in variables if layout_of(v) is None],
        gather=lambda slices: {path: owner.gather(slices[path]) for path, owner in owners.items()},
        scatter=lambda gradients: {path: owner.scatter(gradients[path]) for path, owner in owners.items()},
        apply=with_remat(apply, remat),
        length=1 if stack is None else stack.length,
        stacked=stack is not None,
    )
