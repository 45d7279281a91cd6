"""Runs the forward pass of a chain by interpreting a plan's events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree, Shaped

from ..collectives import Turn, turn_after
from ._collect import Piece, collect
from ._effects import effects_explained
from ._events import Barrier, Compute, Divide, Event, Fetch, Gather, Loop, Offload, Plan, Reduce
from ._host import to_host, without_activations
from ._offloads import record_offload
from ._stage import ByLayer, Outputs, Stage, in_loop, is_mark, place, renumbered
from ._stamps import Stamper
from ._ties import together

Tree = Any


class Residuals(NamedTuple):
    """The values that `backward` needs, by stage and layer.

    Attributes:
        layers: the residuals of each layer. Those of a loop's layers are stacked, under the number of the first layer.
        sent: what was prepared for sending, for each layer whose gathered weights are not kept; empty unless
            `Plan.keep_sent`.
        host: the activations in the host's memory, which `layers` does not contain. Those that a loop moves are
            stacked, under the number of the first layer that they belong to.
    """

    layers: ByLayer
    sent: ByLayer
    host: ByLayer


class Forward(NamedTuple):
    """The results of a forward pass.

    Attributes:
        y: the last stage's output.
        outputs: the outputs of each stage in addition to its activation.
        residuals: the values that `backward` needs.
    """

    y: Tree
    outputs: list[Outputs]
    residuals: Residuals


def forward(
    stages: Sequence[Stage],
    x: PyTree[Shaped[jax.Array, " ..."]],
    plan: Plan,
    shared: Tree = (),
    *,
    differentiated: bool = True,
) -> Forward:
    """Runs `x` through the stages.

    This is a pure function: several passes may be in progress at once, and each `backward` may follow at any time.

    Args:
        stages: the stages to run; the output of one is the input of the next.
        x: the input, a pytree of arrays.
        plan: the plan that `plan` returned for the lengths of these stages.
        shared: a pytree of arrays that is passed to every layer of the stages with `takes_shared`.
        differentiated: whether `backward` follows. If not, there are no residuals of layers.
    """
    walk = _Forward(stages, shared, plan.keep_sent, differentiated)
    (x, weights, saved), done, host = walk.run(plan.forward, _Carry(x, {}, {}), 0)
    assert not weights, f"gathered but never used: {sorted(weights)}"
    assert not saved, f"saved for the host but never moved: {sorted(saved)}"
    pieces: list[list[Piece]] = [[] for _ in stages]
    for (stage, layer), (_, outputs, several) in done.items():
        pieces[stage].append((layer, outputs, several))
    outputs = collect(pieces, [stage.stacked for stage in stages])
    layers = {key: closure for key, (closure, _, _) in done.items()}
    return Forward(x, outputs, Residuals(layers, walk.sent, host))


class _Carry(NamedTuple):
    """The values that are passed from layer to layer.

    Attributes:
        x: the activation.
        weights: the gathered weights that have not been used yet.
        saved: the activations that layers have saved and that have not been moved to the host yet.
    """

    x: Tree
    weights: ByLayer
    saved: ByLayer


class _Forward:
    def __init__(self, stages: Sequence[Stage], shared: Tree, keep_sent: bool, differentiated: bool):
        self.stages = stages
        self.differentiated = differentiated
        self.shared = shared
        self.keep_sent = keep_sent
        self.sent: ByLayer = {}
        self.stamper = Stamper(stages, "forward")

    def run(
        self, events: Sequence[Event], carry: _Carry, origin: Any, loop: Loop | None = None
    ) -> tuple[_Carry, ByLayer, ByLayer]:
        """Runs the events.

        Args:
            events: the events.
            carry: the values before the events.
            origin: 0; in a loop's body, the layer of the iteration, to which layer numbers in `events` are relative.
            loop: the loop, if `events` are its body.

        Returns:
            The carry after the events. For each layer, a triple: its residual, its outputs, and whether both are
            stacked over several layers. For each layer that was offloaded, the activations on the host.
        """
        x, weights, saved = carry
        weights, saved, done, host, moving = dict(weights), dict(saved), {}, {}, {}
        for event in events:
            match event:
                case Gather(stage, layer):
                    number = place(origin, layer)
                    prepared = self.stages[stage].prepare_layer(number, x)
                    weights[stage, layer] = self.stages[stage].gather_layer(number, prepared, x)
                    if self.keep_sent:
                        self.sent[stage, layer] = prepared
                case Compute(stage, layer, keep, away):
                    own = weights.pop((stage, layer))
                    if keep:
                        self.sent.pop((stage, layer), None)
                    x, own = self.stamper.begins((x, own), event, origin, loop)
                    given, turn = x, turn_after(weights)
                    x, closure, outputs = self._compute(self.stages[stage], place(origin, layer), x, own, keep, turn)
                    if away:
                        closure, saved[stage, layer], inputs = without_activations(closure)
                        record_offload(self.stages[stage].source, given, saved[stage, layer], inputs)
                    x = self.stamper.computed(x, event, origin, loop, events)
                    done[stage, layer] = closure, outputs, False
                case Offload(stage, layer):
                    moving[stage, layer] = to_host(saved.pop((stage, layer)))
                case Barrier():
                    if in_loop(origin):
                        x, weights = together(x, weights)
                    else:  # a copy to the host ends with this layer, so that the arrays on the device can be freed
                        x, weights, moving = together(x, weights, moving)
                    host |= moving
                    moving = {}
                case Loop():
                    (x, weights, saved), looped, moved = self._loop(event, _Carry(x, weights, saved))
                    done |= looped
                    host |= moved
                case Reduce() | Divide() | Fetch():
                    raise AssertionError(f"{event} has no place in forward")
        assert not moving, "moved to the host without a barrier"
        return _Carry(x, weights, saved), done, host

    def _loop(self, loop: Loop, carry: _Carry) -> tuple[_Carry, ByLayer, ByLayer]:
        def body(carry: _Carry, layer: jax.Array) -> tuple[_Carry, Tree]:
            carry, done, host = self.run(loop.body, carry, layer, loop)
            return _moved(carry, -1), ({key: value[:2] for key, value in done.items()}, host)

        carry, (done, host) = lax.scan(
            body, _moved(carry, -loop.start), jnp.arange(loop.start, loop.stop), unroll=loop.unroll
        )
        looped = {key: (*value, True) for key, value in renumbered(done, loop.start).items()}
        return _moved(carry, loop.stop), looped, renumbered(host, loop.start)

    def _compute(
        self, stage: Stage, layer: Any, x: Tree, weights: Tree, keep: bool, turn: Turn
    ) -> tuple[Tree, Any, Outputs]:
        def apply(*operands: Tree) -> tuple[Tree, Tree]:
            y, outputs = stage.apply(*operands)
            return (y, outputs.scalars), (outputs.state, outputs.metrics)

        params, constants = (stage.of_layer(tree, layer) for tree in (stage.params, stage.constants))
        shared = self.shared if stage.takes_shared else ()
        own = weights if stage.cut is None else stage.cut(weights)
        operands = (own, stage.slots(own), params, x, shared, constants, turn)
        if not self.differentiated:
            y, outputs = stage.apply(*operands)
            return y, None, outputs
        # In the residual, a mark replaces each operand that backward needs but that is not saved. Backward is given the
        # operand again.
        saved = (keep, True, True, True, False, False, False)
        closure: Any
        with effects_explained(stage.name):
            (y, scalars), closure, (state, metrics) = jax.vjp(apply, *operands, has_aux=True, saveable_args=saved)
        if stage.cut is not None:  # backward cuts them again
            of_weights, *others = closure.args_res
            closure = closure.replace(args_res=[_where_saved(of_weights, weights), *others])
        return y, closure, Outputs(state, scalars, metrics)


def _where_saved(residual: Tree, weights: Tree) -> Tree:
    """Returns the residual of cut weights, with each saved weight replaced by the one that it was cut from.

    It has the structure of `weights`, which that of `residual` is not in jax 0.11.2: there it is of tuples, also for a
    dict.
    """
    leaves, structure = jax.tree.flatten(weights)
    pairs = zip(jax.tree.leaves(residual, is_leaf=is_mark), leaves, strict=True)
    return jax.tree.unflatten(structure, [own if is_mark(own) else whole for own, whole in pairs])


def _moved(carry: _Carry, shift: int) -> _Carry:
    return carry._replace(weights=renumbered(carry.weights, shift), saved=renumbered(carry.saved, shift))
