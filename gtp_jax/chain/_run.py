"""The chain: layers run one after the other, each with its weights gathered just in time.

Forward gathers the weights of layer k + 1 while layer k computes. Backward walks the layers in reverse, gathers again
what was not kept, and reduce-scatters the gradient of layer k + 1 while layer k computes. Between the two passes a
weight exists only as a shard. This is the scheme of FSDP (arXiv 2304.11277) and of Generalized Tensor Parallelism
(TransformerEngine #3005), stated as one `custom_vjp` around two passes that walk a list of events.

[Note: ties]
XLA is free to run a gather as early as its operands exist. Left alone it merges the backward gathers with the forward
ones, which keeps every gathered weight alive, and starts others so early that nothing hides them. So each gather is
tied, through an optimization barrier, to the activation that enters the layer ahead of it, and to the one that leaves
it: it starts no sooner than that layer does, and ends with it. The scatters are tied likewise. As nothing of one layer
can then be joined with another's, XLA may be told to join all it can: then a layer is one gather and one scatter.
What a layer left for its backward pass is tied to the gradient that arrives there, or XLA would find what is to be
computed again already computed in forward, and keep it. Shared inputs and constants, which are supplied to backward
anew, are tied there for the same reason.

A layer may exchange tokens with other ranks, on the stream of the gathers. Forward hands it a turn that follows the
gather of the next layer's weights, for which its exchange waits; the turn's gradient follows the layer's last exchange
in backward, for which gather and scatter wait (`gtp_jax.collectives.use_turn`). Of other layers it is a zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import PyTree, Shaped

from ..weights import Apart
from ._backward import backward
from ._events import Loop
from ._forward import forward
from ._plan import plan
from ._schedule import Schedule
from ._stage import Outputs, Stage

Tree = Any


def run(
    stages: Sequence[Stage], x: PyTree[Shaped[jax.Array, " ..."]], schedule: Schedule, shared: Tree = ()
) -> tuple[Tree, list[Outputs]]:
    """Runs `x` through the stages in order.

    Args:
        stages: what to run; `y` of one is `x` of the next.
        x: pytree of arrays.
        schedule: when things happen. The result does not depend on it.
        shared: pytree of arrays that every layer of the stages with `takes_shared` is given: positions, masks, an
            encoder's output. They are supplied again in backward, and never saved with a layer; but what a layer
            computes from them is saved as its remat policy says.

    Returns:
        The last stage's output, and each stage's outputs. Differentiable in every stage's `shards` and `params`, in
        `x` and in the floats of `shared`, whose gradients are summed over layers in float32 at least. Both passes are
        differentiable in the same arrays, so that gradients can be differentiated again; `shards` are residuals for
        that alone.
    """
    travels = any(stage.travels for stage in stages)
    events = plan([stage.length for stage in stages], schedule, travels=travels)
    # JAX keeps the rules below with what it has traced: they are given all arrays, and hold none
    bare = [dataclasses.replace(stage, shards=(), gather_inputs=(), params=(), constants=()) for stage in stages]

    def with_arrays(shards: Tree, params: Tree, given: Tree) -> list[Stage]:
        return [
            dataclasses.replace(stage, shards=mine, params=own, gather_inputs=inputs, constants=constants)
            for stage, mine, own, (inputs, constants) in zip(bare, shards, params, given, strict=True)
        ]

    @jax.custom_vjp
    def chain(shards: Tree, given: Tree, params: Tree, x: Tree, shared: Tree) -> tuple[Tree, list[Outputs]]:
        return forward(with_arrays(shards, params, given), x, events, shared)[:2]

    def fwd(shards: Tree, given: Tree, params: Tree, x: Tree, shared: Tree):
        y, outputs, residuals = forward(with_arrays(shards, params, given), x, events, shared)
        return (y, outputs), (shards, given, params, shared, residuals)

    def bwd(saved: Tree, gradients: tuple[Tree, list[Outputs]]):
        shards, given, params, shared, residuals = saved
        gradient, outputs = gradients
        scalars = [one.scalars for one in outputs]
        computed = backward(with_arrays(shards, params, given), residuals, gradient, events, shared, scalars)
        # layers are joined in the dtype of their sums, and only then cast
        of_shards = jax.tree.map(lambda g, shard: g.astype(shard.dtype), computed.shards, shards)
        return of_shards, None, computed.params, computed.x, computed.shared  # straight through what was gathered

    chain.defvjp(fwd, bwd)
    looped = {event.stage for event in events.forward if isinstance(event, Loop)}
    given = [
        (_joined(stage.gather_inputs) if number in looped else stage.gather_inputs, stage.constants)
        for number, stage in enumerate(stages)
    ]
    return chain([stage.shards for stage in stages], given, [stage.params for stage in stages], x, shared)


def _joined(inputs: Tree) -> Tree:
    """Returns the same with stacks that lie apart joined, once for all iterations of a loop."""
    is_apart = lambda leaf: isinstance(leaf, Apart)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.joined() if is_apart(leaf) else leaf, inputs, is_leaf=is_apart)
