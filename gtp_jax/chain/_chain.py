"""The chain: layers run one after the other, each with its weights gathered just in time.

Forward gathers the weights of layer k + 1 while layer k computes. Backward walks the layers in reverse, gathers again
what was not kept, and reduce-scatters the gradient of layer k + 1 while layer k computes. Between the two passes a
weight exists only as a slice. This is the scheme of FSDP (arXiv 2304.11277) and of Generalized Tensor Parallelism
(TransformerEngine #3005), stated as one `custom_vjp`.

[Note: ties]
XLA is free to run a gather as early as its operands exist. Left alone it merges the backward gathers with the forward
ones, which keeps every gathered weight alive, and starts others so early that nothing hides them. So each gather is
tied, through an optimization barrier, to the activation that enters the layer ahead of it, and to the one that leaves
it: it starts no sooner than that layer does, and ends with it. The scatters are tied likewise. As nothing of one layer
can then be joined with another's, XLA may be told to join all it can: then a layer is one gather and one scatter.
What a layer left for its backward pass is tied to the gradient that arrives there, or XLA would find what is to be
computed again already computed in forward, and keep it.

Known limits: float inputs shared by all layers (beside the activation that is handed on) are not supported, as they
would need a gradient of their own; put them into the activation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._gradients import Gradients, collect
from ._schedule import Schedule, segments

Tree = Any


@dataclasses.dataclass(frozen=True)
class Link:
    """One stretch of the chain: a module, or `length` layers alike.

    Attributes:
        slices: pytree of the weights' slices. If `stacked`, each leaf has a leading dimension of `length`.
        sent: what is gathered: they themselves, or what they were quantized to, stacked likewise; perhaps of more
            layers than these, see `first`.
        whole: pytree of the parameters that are not cut over gtp, stacked likewise.
        fixed: pytree of arrays that have no gradient, such as keys, stacked likewise.
        gather: what one layer sends to its whole weights, of which integers have no gradient.
        slots: makes arrays that stand for such weights where gradients are taken; their values are never read.
        scatter: the gradients of one layer's whole weights and of its slots to that of its slices.
        apply: `(weights, slots, whole, x, fixed) -> y` for one layer.
        length: number of layers.
        stacked: whether leaves carry the leading dimension.
        first: index in `sent` of the first layer: links that are parts of one stack share what is sent, uncopied.
    """

    slices: Tree
    sent: Tree
    whole: Tree
    gather: Callable[[Tree], Tree]
    scatter: Callable[[tuple[Tree, Tree]], Tree]
    apply: Callable[[Tree, Tree, Tree, Tree, Tree], Tree]
    length: int = 1
    stacked: bool = False
    fixed: Tree = ()
    first: int = 0
    slots: Callable[[], Tree] = dict


def run(links: list[Link], x: Tree, schedule: Schedule) -> Tree:
    """Runs `x` through the links in order.

    Args:
        links: what to run; `y` of one is `x` of the next.
        x: pytree of arrays.
        schedule: when things happen. The result does not depend on it.

    Returns:
        The last link's output. Differentiable in every link's `slices` and `whole`, and in `x`.
    """

    @jax.custom_vjp
    def chain(slices: Tree, given: _Given, whole: Tree, x: Tree) -> Tree:
        del slices
        return _Pass(links, given, whole, schedule).forward(x)[0]

    def fwd(slices: Tree, given: _Given, whole: Tree, x: Tree):
        del slices
        y, residuals = _Pass(links, given, whole, schedule).forward(x)
        return y, (given, whole, residuals)

    def bwd(saved: Tree, gradient: Tree):
        given, whole, residuals = saved
        to_slices, to_whole, to_x = _Pass(links, given, whole, schedule).backward(residuals, gradient)
        return to_slices, None, to_whole, to_x  # straight through what was sent

    chain.defvjp(fwd, bwd)
    given = _Given([link.sent for link in links], [link.fixed for link in links])
    return chain([link.slices for link in links], given, [link.whole for link in links], x)


class _Given(NamedTuple):
    """What a pass takes as it is, link by link: it has no gradient."""

    sent: Tree
    fixed: Tree


class _Layer(NamedTuple):
    """A layer's place in the chain, and in backward the closure that its forward pass left."""

    link: int
    index: Any  # traced inside a loop
    closure: Tree = None


class _Waiting(NamedTuple):
    """A gradient of whole weights that is yet to be scattered: that of the layer backward has just left."""

    link: int
    index: Any
    gradient: Tree


class _Pass:
    """One pass over the chain."""

    def __init__(self, links: list[Link], given: _Given, whole: Tree, schedule: Schedule):
        lengths = [link.length for link in links]
        kept = sum(lengths) if schedule.kept == "all" else schedule.kept
        self.links = links
        self.given = given
        self.whole = whole
        self.prefetch = schedule.prefetch
        self.segments = segments(lengths, schedule)
        self.offsets = [sum(lengths[:i]) for i in range(len(lengths))]
        self.first_kept = sum(lengths) - kept

    def forward(self, x: Tree) -> tuple[Tree, list[Tree]]:
        """The output, and each segment's closures for backward: a list, or one stacked closure from a loop."""
        weights = self._gather(_Layer(0, 0), x) if self.prefetch else ()
        closures = []
        for number, segment in enumerate(self.segments):
            link = segment.link
            if segment.loop:
                kept = self._is_kept(link, segment.start)

                def body(carry, index, link=link, kept=kept):
                    x, weights = carry
                    return self._forward_layer(x, weights, _Layer(link, index), _Layer(link, index + 1), kept)

                indices = jnp.arange(segment.start, segment.stop)
                (x, weights), saved = lax.scan(body, (x, weights), indices, unroll=segment.loop)
            else:
                saved = []
                for index in range(segment.start, segment.stop):
                    after = _Layer(link, index + 1) if index + 1 < segment.stop else self._first_of(number + 1)
                    kept = self._is_kept(link, index)
                    (x, weights), closure = self._forward_layer(x, weights, _Layer(link, index), after, kept)
                    saved.append(closure)
            closures.append(saved)
        return x, closures

    def backward(self, closures: list[Tree], gradient: Tree) -> tuple[Tree, Tree, Tree]:
        """The gradients of `slices`, `whole` and `x`."""
        found = Gradients(len(self.links))
        last = self._before(closures, len(self.segments), 0)
        weights = self._gather_again(last, gradient) if self.prefetch and last is not None else ()
        waiting = None
        for number in reversed(range(len(self.segments))):
            segment = self.segments[number]
            if segment.loop:
                gradient, weights, waiting = self._backward_loop(
                    segment, closures[number], gradient, weights, waiting, found
                )
                continue
            for index in reversed(range(segment.start, segment.stop)):
                layer = _Layer(segment.link, index, closures[number][index - segment.start])
                before = self._before(closures, number, index)
                late = waiting and (waiting.link, waiting.gradient)
                gradient, weights, own, scattered, whole = self._backward_layer(gradient, weights, late, layer, before)
                found.whole[segment.link].append((index, whole, False))
                if not self.prefetch:
                    found.slices[segment.link].append((index, scattered, False))
                    continue
                if waiting is not None:
                    found.slices[waiting.link].append((waiting.index, scattered, False))
                waiting = _Waiting(segment.link, index, own)
        if waiting is not None:
            scattered = self.links[waiting.link].scatter(waiting.gradient)
            found.slices[waiting.link].append((waiting.index, scattered, False))
        stacked = [link.stacked for link in self.links]
        return collect(found.slices, stacked), collect(found.whole, stacked), gradient

    def _backward_loop(self, segment, closures, gradient, weights, waiting, found):
        """A loop's layers in reverse; each scatters the gradient of the one behind it."""
        link = segment.link

        def body(carry, step):
            gradient, weights, late = carry
            index, closure = step
            # layers of a loop leave closures of one shape, so this one's stands for that of the layer before
            layer, before = _Layer(link, index, closure), _Layer(link, index - 1, closure)
            late = (link, late) if self.prefetch else None
            gradient, weights, own, scattered, whole = self._backward_layer(gradient, weights, late, layer, before)
            return (gradient, weights, own), (scattered, whole)

        steps = (jnp.arange(segment.start, segment.stop), closures)
        carry = (gradient, weights, waiting.gradient if self.prefetch else ())
        (gradient, weights, own), (scattered, whole) = lax.scan(body, carry, steps, reverse=True, unroll=segment.loop)
        found.whole[link].append((segment.start, whole, True))
        found.slices[link].append((segment.start + int(self.prefetch), scattered, True))
        return gradient, weights, _Waiting(link, segment.start, own) if self.prefetch else None

    def _forward_layer(self, x: Tree, weights: Tree, layer: _Layer, after: _Layer | None, kept: bool):
        if self.prefetch:
            following = self._gather(after, x) if after is not None else ()
        else:
            weights, following = self._gather(layer, x), ()
        link, whole = self.links[layer.link], self._of(self.whole[layer.link], layer)
        fixed = self._of(self.given.fixed[layer.link], layer)

        def run(weights: Tree, slots: Tree, whole: Tree, x: Tree) -> Tree:
            return link.apply(weights, slots, whole, x, fixed)

        # what backward wants of weights that are not kept comes back as a mark, to be gathered again
        y, closure = jax.vjp(run, weights, link.slots(), whole, x, saveable_args=(kept, True, True, True))
        if self.prefetch:
            y, following = _together(y, following)  # ends the gather with this layer
        return (y, following), closure

    def _backward_layer(self, gradient: Tree, weights: Tree, late: Any, layer: _Layer, before: _Layer | None):
        """One layer's backward, the gather of the weights `before` it and the scatter of the gradient behind it.

        Returns:
            The gradient of its input, the gathered weights of the layer before, its own weights' gradient (`()` where
            that was scattered at once), the scattered gradient, and that of its whole parameters.
        """
        following: Tree = ()
        if self.prefetch:
            following = self._gather_again(before, gradient) if before is not None else ()
        else:
            weights = self._gather_again(layer, gradient)
        closure, gradient = _together(layer.closure, gradient)
        if _wants_weights(closure):
            closure = closure.replace(args_res=[weights, *closure.args_res[1:]])
        scattered = self.links[late[0]].scatter(late[1]) if late is not None else ()
        of_weights, of_slots, whole, gradient = closure(gradient)
        own = jax.tree.map(lambda g: () if g.dtype == jax.dtypes.float0 else g, of_weights), of_slots
        if self.prefetch:
            # ends gather and scatter with this layer, and has its weight gradient before the next layer begins
            gradient, own, scattered, following = _together(gradient, own, scattered, following)
            return gradient, following, own, scattered, whole
        gradient, scattered = _together(gradient, self.links[layer.link].scatter(own))
        return gradient, following, (), scattered, whole

    def _gather(self, layer: _Layer, *events: Tree) -> Tree:
        link = self.links[layer.link]
        # tied before it is cut out of a stack, so that forward's piece is not kept for backward
        sent, _ = lax.optimization_barrier((self.given.sent[layer.link], events))
        return link.gather(self._of(sent, layer, link.first))

    def _gather_again(self, layer: _Layer, *events: Tree) -> Tree:
        return self._gather(layer, *events) if _wants_weights(layer.closure) else ()

    def _of(self, tree: Tree, layer: _Layer, first: int = 0) -> Tree:
        """One layer's part of its link's arrays, of which the link's first layer is number `first`."""
        if not self.links[layer.link].stacked:
            return tree
        index = layer.index + first
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), tree)

    def _is_kept(self, link: int, index: int) -> bool:
        return self.offsets[link] + index >= self.first_kept

    def _first_of(self, number: int) -> _Layer | None:
        if number == len(self.segments):
            return None
        return _Layer(self.segments[number].link, self.segments[number].start)

    def _before(self, closures: list[Tree], number: int, index: int) -> _Layer | None:
        """The layer ahead of `index` in segment `number`."""
        if number < len(self.segments) and index > self.segments[number].start:
            segment = self.segments[number]
            return _Layer(segment.link, index - 1, closures[number][index - 1 - segment.start])
        if number == 0:
            return None
        segment, saved = self.segments[number - 1], closures[number - 1]
        return _Layer(segment.link, segment.stop - 1, saved if segment.loop else saved[-1])


def _wants_weights(closure: Any) -> bool:
    """Whether backward needs weights that were not kept. An embedding's, for one, does not."""
    marks = jax.tree.leaves(closure.args_res[0], is_leaf=lambda leaf: type(leaf).__name__ == "NotSaveable")
    return any(type(mark).__name__ == "NotSaveable" for mark in marks)


def _together(*trees: Tree) -> tuple[Tree, ...]:
    """The same values, none available before all are. Gradients of integers pass by: they are no arrays."""
    leaves, tree = jax.tree.flatten(trees)
    real = [i for i, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
    for i, leaf in zip(real, lax.optimization_barrier([leaves[i] for i in real]), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)
