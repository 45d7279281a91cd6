"""One stretch of a chain, and what the interpreter of both passes does with its arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from ..collectives import Turn, tied
from ..weights import Apart

Tree = Any


class Outputs(NamedTuple):
    """What a layer, or all layers of a stage, return beside the activation.

    Of a stacked stage each array has a leading dimension of the stage's length.

    Attributes:
        state: updated state, such as batch statistics. It has no gradient, and is made in forward alone.
        scalars: floats that are differentiated, such as auxiliary losses: one a layer, not summed, so that the caller
            may weigh them.
        metrics: what is reported. It has no gradient.
    """

    state: Tree = ()
    scalars: Tree = ()
    metrics: Tree = ()


@dataclasses.dataclass(frozen=True)
class Stage:
    """A module, or `length` layers alike.

    Attributes:
        shards: pytree of the weights' shards. If `stacked`, each leaf has a leading dimension of `length`.
        gather_inputs: what is gathered: the shards themselves or their quantized form, stacked likewise; perhaps of
            more layers than these, see `first`.
        params: pytree of floats that are differentiated and used as they are: parameters that are not sharded, and
            slots into which backward puts values by way of their gradients. Stacked likewise.
        prepare: makes of one layer's `gather_inputs`, without communication, what is sent in the place of some of
            them. Layers that are written out keep it for backward.
        gather: maps one layer's shards, `gather_inputs` and what `prepare` returned to its gathered weights, of which
            integers have no gradient. It is differentiated, in the shards alone, only where a gradient is
            differentiated again.
        reduce: sums the gradients of one layer's gathered weights and of its slots over the ranks.
        finish: makes the gradient of the layer's shards of what `reduce` returned, without communication. It runs once
            the layer's barrier is behind, so that XLA can write shards where all layers are collected. Gradients may
            be in a narrower dtype than the shards', in which they were summed.
        apply: `(weights, slots, params, x, shared, constants, turn) -> (y, Outputs)` of one layer; of `turn`, see
            `gtp_jax.collectives.use_turn`.
        length: number of layers.
        stacked: whether leaves carry the leading dimension.
        constants: pytree of arrays without a gradient: keys, integers. Stacked likewise.
        first: index in `gather_inputs` of the first layer: stages that are parts of one stack share them, uncopied.
        slots: makes, of one layer's gathered weights, arrays that stand for some of them where gradients are taken;
            their values are never read. If it makes any, it and `gather` return dicts, and a weight whose key has a
            slot has no gradient of its own.
        takes_shared: whether `apply` gets the chain's shared inputs; `()` otherwise.
        travels: whether `gather` communicates or decodes anything, instead of only casting and joining shards.
        frozen: keys of gathered weights of which no gradient is wanted, which `reduce` is not given.
    """

    shards: Tree
    gather_inputs: Tree
    params: Tree
    gather: Callable[[Tree, Tree, Tree], Tree]
    reduce: Callable[[tuple[Tree, Tree]], Tree]
    apply: Callable[[Tree, Tree, Tree, Tree, Tree, Tree, Turn], tuple[Tree, Outputs]]
    length: int = 1
    stacked: bool = False
    constants: Tree = ()
    first: int = 0
    prepare: Callable[[Tree], Tree] = lambda inputs: ()
    finish: Callable[[Tree], Tree] = lambda reduced: reduced
    slots: Callable[[Tree], Tree] = lambda weights: {}
    takes_shared: bool = False
    travels: bool = True
    frozen: frozenset[Any] = frozenset()

    def of_layer(self, tree: Tree, layer: Any, first: int = 0) -> Tree:
        """Returns one layer's part of a pytree; in a stacked one, layer 0 has the index `first`."""
        if not self.stacked:
            return tree
        index = place(layer, first)

        def part(stack: Any) -> jax.Array:
            return stack.layer(index) if _is_apart(stack) else lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)

        return jax.tree.map(part, tree, is_leaf=_is_apart)

    def prepare_layer(self, layer: Any, after: Tree) -> Tree:
        """Prepares what a layer sends, no sooner than the values `after` have arrived."""
        # tied before it is cut out of a stack, so that forward's piece is not kept for backward
        inputs, _ = lax.optimization_barrier((self._read(layer), after))
        return self.prepare(self.of_layer(inputs, layer, self.first))

    def gather_layer(self, layer: Any, prepared: Tree, after: Tree, turn: Turn | None = None) -> Tree:
        """Gathers the weights of a layer, no sooner than the values `after` have arrived, and than a turn."""
        inputs, prepared, _ = lax.optimization_barrier((self._read(layer), prepared, after))
        if turn is not None:
            inputs, prepared = tied((inputs, prepared), turn)
        own = self.of_layer(inputs, layer, self.first)
        return self.gather(self.of_layer(self.shards, layer), own, prepared)

    def _read(self, layer: Any) -> Tree:
        """Returns `gather_inputs`, in which stacks that lie apart hold this layer alone."""
        index = place(layer, self.first)
        return jax.tree.map(lambda a: a.only(index) if _is_apart(a) else a, self.gather_inputs, is_leaf=_is_apart)


def together(*trees: Tree) -> tuple[Tree, ...]:
    """Returns the same values, none of which is available before all are."""
    return _with_arrays(lax.optimization_barrier, trees)


def tied_trees(tree: Tree, turn: Turn) -> Tree:
    """Returns the same values, no sooner than a turn."""
    return _with_arrays(lambda arrays: tied(arrays, turn), tree)


def _with_arrays(change: Callable[[list[Any]], list[Any]], tree: Tree) -> Tree:
    """Returns the tree with what `change` makes of its arrays. Gradients of integers (`float0`) are none, and stay."""
    leaves, structure = jax.tree.flatten(tree)
    real = [i for i, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
    for i, leaf in zip(real, change([leaves[i] for i in real]), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def place(origin: Any, layer: int) -> Any:
    """Returns the layer's number; in a loop `layer` is counted from the iteration's layer, `origin`."""
    return origin + layer if layer else origin


def _is_apart(leaf: Any) -> bool:
    return isinstance(leaf, Apart)


# A value for each layer that is in flight or done, by stage and layer.
ByLayer = dict[tuple[int, int], Tree]


def renumbered(by_layer: ByLayer, shift: int) -> ByLayer:
    """Returns the same with layers counted from another origin."""
    return {(stage, layer + shift): tree for (stage, layer), tree in by_layer.items()}
