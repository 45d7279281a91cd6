"""Runs layers one after another, gathering the weights of each layer just in time.

With prefetching, forward gathers the weights of layer k + 1 while layer k computes. Backward processes the layers in
reverse. While layer k computes, it gathers the weights of layer k - 1 again, unless they were kept or backward does not
need them, and reduce-scatters the gradient of layer k + 1. Between the two passes, each rank has only its own part of
the weights that are not kept. This is the scheme of FSDP (arXiv 2304.11277) and of Generalized Tensor Parallelism
(TransformerEngine #3005), expressed as one `custom_vjp` around two passes, each of which interprets a list of events.

[Note: ties]
XLA is free to run a gather as soon as its operands exist. Left alone, it merges the backward gathers with the forward
gathers, which keeps every gathered weight alive, and starts other gathers so early that they overlap with no compute.
Therefore, optimization barriers tie each prefetched gather to the input and the output of the layer that computes
meanwhile: the gather cannot start before that layer, and must end before the next layer starts. The scatters are tied
in the same way. Because XLA cannot combine collectives of different layers across these barriers, it can safely be told
to combine as much as possible, which usually leaves one gather and one scatter per layer.

The residuals of a layer are tied to the gradient that arrives at its backward pass. Otherwise XLA would notice that
what is to be recomputed has already been computed in forward, and keep it. Shared inputs and constants, which are
supplied to backward again, are tied there for the same reason.

A layer may exchange tokens with other ranks, on the same stream as the gathers. Forward passes it a turn that follows
the gather of the next layer's weights, if they are prefetched, and the layer's exchange waits for this turn. In
backward, the turn's gradient follows the layer's last exchange, and the gathers and scatters that come after the layer
in the plan wait for it (`gtp_jax.collectives.use_turn`). If a layer does not use its turn, the turn's gradient is a
zero that nothing has to wait for.
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
        stages: the stages to run; the output `y` of one is the input `x` of the next.
        x: the input, a pytree of arrays.
        schedule: the schedule to follow. Except for rounding, the result does not depend on it.
        shared: a pytree of arrays that is passed to every layer of the stages with `takes_shared`, such as positions,
            masks or an encoder's output. They are supplied again in backward and never saved with a layer. What a layer
            computes from them is saved according to its rematerialization policy.

    Returns:
        The last stage's output, and the further outputs of each stage. In reverse mode, the output and the `scalars`
        are differentiable with respect to `x`, the floats of `shared`, and the `shards` and `params` of every stage;
        `state` and `metrics` have no gradient. The gradients of the floats of `shared` are summed over layers in
        float32 or wider, and then cast to the dtypes of these floats. The backward pass is differentiable with respect
        to the same arrays, so gradients can be differentiated again. The values of `shards` are residuals only for that
        purpose.
    """
    only_casts = not any(stage.travels or stage.frozen for stage in stages)
    lengths = [stage.length for stage in stages]
    events = plan(lengths, schedule, only_casts=only_casts, offload=[stage.offload for stage in stages])
    alone = plan(lengths, schedule, only_casts=only_casts)  # without differentiation, nothing is saved or moved
    # JAX caches the rules below along with traces, so they take all arrays as arguments and close over none
    bare = [dataclasses.replace(stage, shards=(), gather_inputs=(), params=(), constants=()) for stage in stages]

    def with_arrays(shards: Tree, params: Tree, given: Tree) -> list[Stage]:
        return [
            dataclasses.replace(stage, shards=mine, params=own, gather_inputs=inputs, constants=constants)
            for stage, mine, own, (inputs, constants) in zip(bare, shards, params, given, strict=True)
        ]

    @jax.custom_vjp
    def chain(shards: Tree, given: Tree, params: Tree, x: Tree, shared: Tree) -> tuple[Tree, list[Outputs]]:
        return forward(with_arrays(shards, params, given), x, alone, shared)[:2]

    def fwd(shards: Tree, given: Tree, params: Tree, x: Tree, shared: Tree):
        y, outputs, residuals = forward(with_arrays(shards, params, given), x, events, shared)
        return (y, outputs), (shards, given, params, shared, residuals)

    def bwd(saved: Tree, gradients: tuple[Tree, list[Outputs]]):
        shards, given, params, shared, residuals = saved
        gradient, outputs = gradients
        scalars = [one.scalars for one in outputs]
        computed = backward(with_arrays(shards, params, given), residuals, gradient, events, shared, scalars)
        # cast only here, so that the gradients of all layers are stacked in the dtype in which they were summed
        of_shards = jax.tree.map(lambda g, shard: g.astype(shard.dtype), computed.shards, shards)
        return of_shards, None, computed.params, computed.x, computed.shared  # gradients of gather_inputs go to shards

    chain.defvjp(fwd, bwd)
    looped = {event.stage for event in events.forward if isinstance(event, Loop)}
    given = [
        (_joined(stage.gather_inputs) if number in looped else stage.gather_inputs, stage.constants)
        for number, stage in enumerate(stages)
    ]
    return chain([stage.shards for stage in stages], given, [stage.params for stage in stages], x, shared)


def _joined(inputs: Tree) -> Tree:
    """Returns the inputs with each `Apart` joined into one array, once for all iterations of a loop."""
    is_apart = lambda leaf: isinstance(leaf, Apart)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.joined() if is_apart(leaf) else leaf, inputs, is_leaf=is_apart)
