"""The stages of a chain, and the operations on their arrays that both passes use."""

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
    """The outputs of a layer, or of all layers of a stage, in addition to the activation.

    In a stacked stage, each array has a leading dimension of the stage's length.

    Attributes:
        state: the updated state, such as batch statistics. It has no gradient, and is computed only in forward.
        scalars: floats that are differentiated, such as auxiliary losses. There is one per layer, not a sum, so that
            the caller may weight them.
        metrics: values to report, which have no gradient.
    """

    state: Tree = ()
    scalars: Tree = ()
    metrics: Tree = ()


@dataclasses.dataclass(frozen=True)
class Stage:
    """A module, or `length` layers of the same structure.

    Attributes:
        shards: a pytree of the weights' shards. If `stacked`, each leaf has a leading dimension of `length`.
        gather_inputs: what is gathered: the shards themselves or their quantized form, with the same leading dimension.
            May contain more layers than this stage has; see `first`.
        params: a pytree of floats that are differentiated and used without gathering: parameters that are not sharded,
            and slots whose gradients return values from backward. They have the same leading dimension.
        prepare: a function that computes from one layer's `gather_inputs`, without communication, what is sent instead
            of some of them. Unrolled layers keep its result for backward.
        gather: a function from one layer's shards, `gather_inputs` and result of `prepare` to its gathered weights;
            integers among these have no gradient. It is differentiated only if a gradient is differentiated again, and
            only with respect to the shards.
        reduce: a function that sums the gradients of one layer's gathered weights and slots over the ranks.
        finish: a function that computes the gradient of the layer's shards from the result of `reduce`, without
            communication. It runs after the layer's barrier, so that XLA can write the result directly to where the
            gradients of all layers are collected. Gradients may have a narrower dtype than the shards: the dtype in
            which they were summed.
        apply: the layer's function, `(weights, slots, params, x, shared, constants, turn) -> (y, Outputs)`; for `turn`,
            see `gtp_jax.collectives.use_turn`.
        length: the number of layers.
        stacked: whether leaves have the leading dimension.
        constants: a pytree of arrays without gradients, such as keys and integers, with the same leading dimension.
        first: the index of the first layer in `gather_inputs`. Stages that are parts of one stack share
            `gather_inputs` without copying them.
        slots: a function that returns, for one layer's gathered weights, arrays that represent some of them when
            gradients are taken; their values are never read. If it returns any, both it and `gather` return dicts, and
            a weight whose key has a slot has no gradient of its own.
        takes_shared: whether `apply` receives the chain's shared inputs; otherwise it receives `()`.
        travels: whether `gather` communicates or decodes anything, instead of only casting and joining shards.
        offload: whether the activations that layers save are moved to the host's memory between the passes.
        frozen: the keys of gathered weights that need no gradient. `reduce` does not receive their gradients.
        source: the name of the module that the layers belong to, for `offloads_recorded`.
        cut: a function from the result of `gather` to the weights that `apply` takes, whose gradients `reduce` takes;
            `None` if they are the same. Both passes call it where weights are used, so that XLA can read a part of a
            gathered array in place. Some weights may be `None`.
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
    offload: bool = False
    frozen: frozenset[Any] = frozenset()
    source: str = ""
    cut: Callable[[Tree], Tree] | None = None

    def of_layer(self, tree: Tree, layer: Any, first: int = 0) -> Tree:
        """Returns one layer's part of a pytree. In a stacked pytree, layer 0 has the index `first`."""
        if not self.stacked:
            return tree
        index = place(layer, first)

        def part(stack: Any) -> jax.Array:
            return stack.layer(index) if _is_apart(stack) else lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)

        return jax.tree.map(part, tree, is_leaf=_is_apart)

    def prepare_layer(self, layer: Any, after: Tree) -> Tree:
        """Prepares what a layer sends, but not before the values `after` are available."""
        # tied before slicing the stack, so that forward's slice is not kept for backward
        inputs, _ = lax.optimization_barrier((self._read(layer), after))
        return self.prepare(self.of_layer(inputs, layer, self.first))

    def gather_layer(self, layer: Any, prepared: Tree, after: Tree, turn: Turn | None = None) -> Tree:
        """Gathers the weights of a layer, but not before the values `after` and the turn are available."""
        inputs, prepared, _ = lax.optimization_barrier((self._read(layer), prepared, after))
        if turn is not None:
            inputs, prepared = tied((inputs, prepared), turn)
        own = self.of_layer(inputs, layer, self.first)
        return self.gather(self.of_layer(self.shards, layer), own, prepared)

    def _read(self, layer: Any) -> Tree:
        """Returns `gather_inputs`, with `Apart` stacks reduced to this layer."""
        index = place(layer, self.first)
        return jax.tree.map(lambda a: a.only(index) if _is_apart(a) else a, self.gather_inputs, is_leaf=_is_apart)


def together(*trees: Tree) -> tuple[Tree, ...]:
    """Returns the same values through an optimization barrier: none of them is available before all are."""
    return _with_arrays(lax.optimization_barrier, trees)


def tied_trees(tree: Tree, turn: Turn) -> Tree:
    """Returns the same values, but not before the turn is available."""
    return _with_arrays(lambda arrays: tied(arrays, turn), tree)


def _with_arrays(change: Callable[[list[Any]], list[Any]], tree: Tree) -> Tree:
    """Replaces the arrays of a tree with what `change` returns for them. Gradients of integers (`float0`) are not JAX
    arrays and stay as they are."""
    leaves, structure = jax.tree.flatten(tree)
    real = [i for i, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
    for i, leaf in zip(real, change([leaves[i] for i in real]), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def place(origin: Any, layer: int) -> Any:
    """Returns the number of a layer. In a loop, `layer` is relative to the iteration's layer, `origin`."""
    return origin + layer if layer else origin


def in_loop(origin: Any) -> bool:
    """Returns whether `origin` is the layer of a loop's iteration.

    In a loop, copies to the host and back are not tied to the layer. They stay within the iteration anyway, because
    each iteration reads and writes its own part of an array on the host; and XLA accepts no barrier between a copy and
    that array.
    """
    return not isinstance(origin, int)


def _is_apart(leaf: Any) -> bool:
    return isinstance(leaf, Apart)


def is_mark(leaf: Any) -> bool:
    """Returns whether a leaf of a residual is the mark of an operand that was not saved."""
    return type(leaf).__name__ in ("NotSaveable", "NotNeeded")


# A value for each layer that is in flight or finished, by stage and layer.
ByLayer = dict[tuple[int, int], Tree]


def renumbered(by_layer: ByLayer, shift: int) -> ByLayer:
    """Returns the same values with all layer numbers shifted by `shift`."""
    return {(stage, layer + shift): tree for (stage, layer), tree in by_layer.items()}
