"""Defines the stages of a chain, and operations that both passes use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from ..collectives import Turn, tied
from ..weights import Apart
from ._ties import together

Tree = Any


class Outputs(NamedTuple):
    """The outputs of a layer, or of all layers of a stage, in addition to the activation.

    The outputs of a stacked stage have a leading dimension over its layers.

    Attributes:
        state: the updated state, such as batch statistics. It has no gradient, and is computed only in forward.
        scalars: floats that are differentiated, such as auxiliary losses. They are not summed over layers, so that the
            caller can weight them.
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
        gather_inputs: a pytree of what is gathered: the shards themselves or their quantized form. If `stacked`, each
            leaf is an array with a leading dimension over layers, or an `Apart`, and may contain more layers than this
            stage has; see `first`.
        params: a pytree of floats that are differentiated and used without gathering: parameters that are not sharded,
            and slots whose gradients return values from backward. If `stacked`, they have a leading dimension of
            `length`.
        prepare: a function that computes from one layer's `gather_inputs`, without communication, what is sent instead
            of some of them. If `Plan.keep_sent`, a layer that does not keep its gathered weights keeps this result for
            backward instead.
        gather: a function from one layer's shards, `gather_inputs` and result of `prepare` to its gathered weights;
            integers among these have no gradient. It is differentiated only if a gradient is differentiated again, and
            only with respect to the shards.
        pending: a function from the gradients of one layer's weights and those of its slots to what `reduce` takes, so
            that nothing else is kept until then. By default, a pair: the gradients of the weights, except of those that
            have slots, and the gradients of the slots.
        reduce: a function that sums over the ranks what `pending` returns for one layer.
        divide: a function that sums the result of `reduce` over further axes, which divide the shards, and returns what
            `finish` takes; `None` if there are none.
        finish: a function that computes the gradient of the layer's shards from the result of `reduce` or `divide`,
            without communication. It runs after the barrier that ends the sum, if one follows it, so that XLA can write
            the result directly to where the gradients of all layers are collected. The result may have a narrower dtype
            than the shards: the dtype in which gradients were summed.
        apply: the layer's function, `(weights, slots, params, x, shared, constants, turn) -> (y, Outputs)`; for `turn`,
            see `gtp_jax.collectives.use_turn`.
        length: the number of layers; 1 unless `stacked`.
        stacked: whether arrays have a leading dimension over the stage's layers.
        constants: a pytree of arrays without gradients, such as keys and integers. If `stacked`, they have a leading
            dimension of `length`.
        first: the index of the stage's first layer in `gather_inputs`. It lets stages that are parts of one stack share
            `gather_inputs` without copying them.
        slots: a function from the weights that `apply` takes to arrays that represent some of them when gradients are
            taken; their values are never read. If it returns any, both it and `gather` return dicts.
        takes_shared: whether `apply` receives the chain's shared inputs; otherwise it receives `()`.
        travels: whether `gather` communicates or decodes anything, instead of only casting and joining shards.
        offload: whether the activations that layers save are moved to the host's memory between the passes, except
            those of the chain's last layer.
        frozen: the keys of gathered weights that need no gradient. `reduce` does not receive their gradients. If there
            are any, `gather` returns a dict.
        trains_some: whether `shards` and the result of `gather` are dicts with the same keys, and the weights whose
            shards are not differentiated are `frozen` too. If so, `finish` returns `None` for these.
        source: the name of the module that the layers belong to, for `offloads_recorded`.
        name: the name of the layers' class, for errors.
        cut: a function from the result of `gather` to the weights that `apply` takes, whose gradients `reduce` takes;
            `None` if they are the same. Both passes call it where weights are used, so that XLA can read a part of a
            gathered array in place. In backward, weights that are not needed may be passed to it as `None`.
    """

    shards: Tree
    gather_inputs: Tree
    params: Tree
    gather: Callable[[Tree, Tree, Tree], Tree]
    reduce: Callable[[Tree], Tree]
    apply: Callable[[Tree, Tree, Tree, Tree, Tree, Tree, Turn], tuple[Tree, Outputs]]
    length: int = 1
    stacked: bool = False
    constants: Tree = ()
    first: int = 0
    prepare: Callable[[Tree], Tree] = lambda inputs: ()
    divide: Callable[[Tree], Tree] | None = None
    finish: Callable[[Tree], Tree] = lambda reduced: reduced
    slots: Callable[[Tree], Tree] = lambda weights: {}
    pending: Callable[[Tree, Tree], Tree] = lambda weights, slots: (_without(slots, weights), slots)
    takes_shared: bool = False
    travels: bool = True
    offload: bool = False
    frozen: frozenset[Any] = frozenset()
    trains_some: bool = False
    source: str = ""
    name: str = "a layer"
    cut: Callable[[Tree], Tree] | None = None

    def of_layer(self, tree: Tree, layer: Any, first: int = 0) -> Tree:
        """Returns one layer's part of a pytree. In a stacked pytree, `first` is the index of layer 0. If the stage is
        not stacked, returns the whole pytree."""
        if not self.stacked:
            return tree
        index = place(layer, first)

        def part(stack: Any) -> jax.Array:
            return stack.layer(index) if _is_apart(stack) else lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)

        return jax.tree.map(part, tree, is_leaf=_is_apart)

    def prepare_layer(self, layer: Any, after: Tree) -> Tree:
        """Returns the result of `prepare` for a layer. `prepare` waits for the values in `after`."""
        # tied before slicing the stack, so that forward's slice is not kept for backward
        inputs, _ = together(self._read(layer), after)
        return self.prepare(self.of_layer(inputs, layer, self.first))

    def gather_layer(self, layer: Any, prepared: Tree, after: Tree, turn: Turn | None = None) -> Tree:
        """Gathers the weights of a layer. The gather waits for the values in `after` and, if a turn is given, for the
        turn."""
        inputs, prepared, _ = together(self._read(layer), prepared, after)
        if turn is not None:
            inputs, prepared = tied((inputs, prepared), turn)
        own = self.of_layer(inputs, layer, self.first)
        return self.gather(self.of_layer(self.shards, layer), own, prepared)

    def _read(self, layer: Any) -> Tree:
        """Returns `gather_inputs`, with `Apart` stacks reduced to this layer."""
        index = place(layer, self.first)
        return jax.tree.map(lambda a: a.only(index) if _is_apart(a) else a, self.gather_inputs, is_leaf=_is_apart)


def _without(keys: Tree, weights: Tree) -> Tree:
    return {key: own for key, own in weights.items() if key not in keys} if keys else weights


def place(origin: Any, layer: int) -> Any:
    """Returns the number of a layer. In a loop, `layer` is relative to the iteration's layer, `origin`."""
    return origin + layer if layer else origin


def in_loop(origin: Any) -> bool:
    """Returns whether `origin` is the layer of a loop's iteration.

    In a loop, XLA accepts no barrier between a copy and the array on the host. Therefore, only the end of a copy back
    is tied to the layer, by the layer's barrier; the start of that copy and copies to the host are not tied. The copies
    stay within their iteration anyway, because each iteration writes (in forward) or reads (in backward) its own part
    of that array.
    """
    return not isinstance(origin, int)


def _is_apart(leaf: Any) -> bool:
    return isinstance(leaf, Apart)


def is_mark(leaf: Any) -> bool:
    """Returns whether a leaf of a residual is the mark of an operand that was not saved."""
    return type(leaf).__name__ in ("NotSaveable", "NotNeeded")


# Values of layers, by stage and layer number.
ByLayer = dict[tuple[int, int], Tree]


def renumbered(by_layer: ByLayer, shift: int) -> ByLayer:
    """Returns the same values with all layer numbers shifted by `shift`."""
    return {(stage, layer + shift): tree for (stage, layer), tree in by_layer.items()}
