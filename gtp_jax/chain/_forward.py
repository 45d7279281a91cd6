"""The interpreter's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree, Shaped

from ..collectives import Turn, turn_after
from ._collect import Piece, collect
from ._events import Barrier, Compute, Event, Gather, Loop, Plan, Reduce
from ._stage import ByLayer, Outputs, Stage, place, renumbered, together

Tree = Any


class Residuals(NamedTuple):
    """The values that `backward` needs, by stage and layer.

    Attributes:
        layers: the residuals of each layer. Those of a loop's layers are stacked, under the number of the first layer.
        sent: what was prepared for sending, for each layer whose gathered weights are not kept; empty unless
            `Plan.keep_sent`.
    """

    layers: ByLayer
    sent: ByLayer


class Forward(NamedTuple):
    """The results of a forward pass.

    Attributes:
        y: the last stage's output.
        outputs: the further outputs of each stage.
        residuals: the values that `backward` needs.
    """

    y: Tree
    outputs: list[Outputs]
    residuals: Residuals


def forward(stages: Sequence[Stage], x: PyTree[Shaped[jax.Array, " ..."]], plan: Plan, shared: Tree = ()) -> Forward:
    """Runs `x` through the stages.

    This is a pure function: several passes may be in progress at once, and each `backward` may follow at any time.

    Args:
        stages: the stages to run; the output of one is the input of the next.
        x: the input, a pytree of arrays.
        plan: the plan that `plan` returned for the lengths of these stages.
        shared: a pytree of arrays that is passed to every layer of the stages with `takes_shared`.
    """
    walk = _Forward(stages, shared, plan.keep_sent)
    x, weights, done = walk.run(plan.forward, x, {}, 0)
    assert not weights, f"gathered but never used: {sorted(weights)}"
    pieces: list[list[Piece]] = [[] for _ in stages]
    for (stage, layer), (_, outputs, several) in done.items():
        pieces[stage].append((layer, outputs, several))
    outputs = collect(pieces, [stage.stacked for stage in stages])
    layers = {key: closure for key, (closure, _, _) in done.items()}
    return Forward(x, outputs, Residuals(layers, walk.sent))


class _Forward:
    def __init__(self, stages: Sequence[Stage], shared: Tree, keep_sent: bool):
        self.stages = stages
        self.shared = shared
        self.keep_sent = keep_sent
        self.sent: ByLayer = {}

    def run(self, events: Sequence[Event], x: Tree, weights: ByLayer, origin: Any) -> tuple[Tree, ByLayer, ByLayer]:
        """Returns the activation, the weights in flight and, for each layer, its closure, its outputs, and whether
        these are a stack of several layers."""
        weights, done = dict(weights), {}
        for event in events:
            match event:
                case Gather(stage, layer):
                    number = place(origin, layer)
                    prepared = self.stages[stage].prepare_layer(number, x)
                    weights[stage, layer] = self.stages[stage].gather_layer(number, prepared, x)
                    if self.keep_sent:
                        self.sent[stage, layer] = prepared
                case Compute(stage, layer, keep):
                    own = weights.pop((stage, layer))
                    if keep:
                        self.sent.pop((stage, layer), None)
                    turn = turn_after(weights)
                    x, closure, outputs = self._compute(self.stages[stage], place(origin, layer), x, own, keep, turn)
                    done[stage, layer] = closure, outputs, False
                case Barrier():
                    x, weights = together(x, weights)
                case Loop():
                    x, weights, looped = self._loop(event, x, weights)
                    done |= looped
                case Reduce():
                    raise AssertionError("forward has no gradient to reduce")
        return x, weights, done

    def _loop(self, loop: Loop, x: Tree, weights: ByLayer) -> tuple[Tree, ByLayer, ByLayer]:
        def body(carry: Tree, layer: jax.Array) -> tuple[Tree, Tree]:
            x, weights = carry
            x, weights, done = self.run(loop.body, x, weights, layer)
            return (x, renumbered(weights, -1)), {key: value[:2] for key, value in done.items()}

        carry = x, renumbered(weights, -loop.start)
        (x, weights), done = lax.scan(body, carry, jnp.arange(loop.start, loop.stop), unroll=loop.unroll)
        looped = {key: (*value, True) for key, value in renumbered(done, loop.start).items()}
        return x, renumbered(weights, loop.stop), looped

    def _compute(
        self, stage: Stage, layer: Any, x: Tree, weights: Tree, keep: bool, turn: Turn
    ) -> tuple[Tree, Any, Outputs]:
        def apply(*operands: Tree) -> tuple[Tree, Tree]:
            y, outputs = stage.apply(*operands)
            return (y, outputs.scalars), (outputs.state, outputs.metrics)

        params, constants = (stage.of_layer(tree, layer) for tree in (stage.params, stage.constants))
        shared = self.shared if stage.takes_shared else ()
        operands = (weights, stage.slots(weights), params, x, shared, constants, turn)
        # an operand that backward needs but that is not saved becomes a mark in the residual, to be supplied again
        saved = (keep, True, True, True, False, False, False)
        (y, scalars), closure, (state, metrics) = jax.vjp(apply, *operands, has_aux=True, saveable_args=saved)
        return y, closure, Outputs(state, scalars, metrics)
