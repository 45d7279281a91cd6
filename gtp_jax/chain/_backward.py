"""Runs the backward pass of a chain by interpreting a plan's events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..collectives import Turn, no_turn
from ._collect import Piece, collect
from ._events import Barrier, Compute, Divide, Event, Fetch, Gather, Loop, Offload, Plan, Reduce
from ._floats import is_float
from ._forward import Residuals
from ._host import to_device, with_activations
from ._stage import ByLayer, Stage, in_loop, is_mark, place, renumbered
from ._stamps import Stamper
from ._ties import tied_trees, together

Tree = Any


class Gradients(NamedTuple):
    """The gradients that a backward pass returns: of `shards` and `params` for each stage, and of `x` and `shared`."""

    shards: list[Tree]
    params: list[Tree]
    x: Tree
    shared: Tree


def backward(
    stages: Sequence[Stage],
    residuals: Residuals,
    gradient: Tree,
    plan: Plan,
    shared: Tree = (),
    scalars: Sequence[Tree] | None = None,
    first: int = 0,
) -> Gradients:
    """Returns the gradients of a chain.

    This is a pure function of its arguments, like `forward`.

    Args:
        stages: the same stages as in `forward`.
        residuals: the residuals that `forward` returned.
        gradient: the gradient of the output.
        plan: the same plan as in `forward`.
        shared: the same shared inputs as in `forward`, which were not saved.
        scalars: the gradients of each stage's `Outputs.scalars`; may be omitted if no layer returns scalars.
        first: the first stage of which gradients are needed. `residuals` need not contain those before it.

    Returns:
        The gradients. Those of shards have the dtypes that `Stage.finish` returns. Those of shared floats are summed
        over layers in float32 or wider, and have the dtypes of the floats; those of shared integers are zeros of dtype
        `float0`. If `first` is above 0, the gradients of stages before it, and of `x`, are `None`.
    """
    scalars = [()] * len(stages) if scalars is None else scalars
    walk = _Backward(stages, shared, scalars, residuals)
    events = [event for event in plan.backward if isinstance(event, Barrier) or event.stage >= first]
    carry, done = walk.run(events, _Carry(gradient, {}, {}, {}, walk.zeros(), {}), 0, residuals)
    left = carry.weights, carry.pending, carry.reduced, carry.fetched
    assert not any(left), "gathered, reduced or fetched but never used"
    stacked = [stage.stacked for stage in stages[first:]]
    found = (collect(_pieces(gradients, len(stages))[first:], stacked) for gradients in done)
    shards, params = ([*[None] * first, *own] for own in found)
    return Gradients(shards, params, None if first else carry.gradient, walk.of_shared(carry.shared))


class _Carry(NamedTuple):
    """The values that are passed from layer to layer.

    Attributes:
        gradient: the gradient of the activation.
        weights: the gathered weights that have not been used yet.
        pending: the gradients of gathered weights that have not been reduced yet.
        reduced: the gradients that have been reduced, and wait to be divided.
        shared: the gradients of the shared floats, summed so far.
        fetched: the activations that have come from the host and have not been used yet.
    """

    gradient: Tree
    weights: ByLayer
    pending: ByLayer
    reduced: ByLayer
    shared: list[jax.Array]
    fetched: ByLayer


class _Done(NamedTuple):
    """The gradients of shards and params, by stage and layer, each paired with whether it stacks several layers."""

    shards: ByLayer
    params: ByLayer


class _Backward:
    def __init__(self, stages: Sequence[Stage], shared: Tree, scalars: Sequence[Tree], residuals: Residuals):
        self.stages = stages
        self.shared = shared
        self.scalars = scalars
        self.sent = residuals.sent
        self.stamper = Stamper(stages, "backward")
        # the stages whose backward needs weights that were not kept; for example, an embedding needs none
        self.regathers = {stage for (stage, _), closure in residuals.layers.items() if any(_marks(closure.args_res[0]))}

    def zeros(self) -> list[jax.Array]:
        floats = [leaf for leaf in jax.tree.leaves(self.shared) if is_float(leaf)]
        return [jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in floats]

    def of_shared(self, sums: list[jax.Array]) -> Tree:
        """Returns the summed gradients in the dtypes of the shared inputs, with `float0` zeros for integers."""
        leaves, tree = jax.tree.flatten(self.shared)
        summed = iter(sums)
        none = jax.dtypes.float0
        return jax.tree.unflatten(
            tree, [next(summed).astype(a.dtype) if is_float(a) else np.zeros(a.shape, none) for a in leaves]
        )

    def run(
        self, events: Sequence[Event], carry: _Carry, origin: Any, residuals: Residuals, loop: Loop | None = None
    ) -> tuple[_Carry, _Done]:
        gradient, weights, pending, reduced, shared, fetched = carry
        weights, pending, reduced, fetched = dict(weights), dict(pending), dict(reduced), dict(fetched)
        summed: ByLayer = {}  # over all axes
        done = _Done({}, {})
        entered, turn = gradient, no_turn()
        for event in events:
            match event:
                case Gather(stage, layer):
                    if stage in self.regathers:
                        weights[stage, layer] = self._gather(stage, layer, place(origin, layer), entered, turn)
                case Reduce(stage, layer):
                    own, gradients = self.stages[stage], tied_trees(pending.pop((stage, layer)), turn)
                    into = summed if own.divide is None else reduced
                    into[stage, layer] = own.reduce(gradients)
                case Divide(stage, layer):
                    divide = self.stages[stage].divide
                    assert divide is not None
                    summed[stage, layer] = divide(tied_trees(reduced.pop((stage, layer)), turn))
                case Compute(stage, layer):
                    entered = gradient
                    gradient = self.stamper.begins(gradient, event, origin, loop)
                    own, residual = weights.pop((stage, layer), ()), residuals.layers[stage, layer]
                    residual = with_activations(residual, fetched.pop((stage, layer), []))
                    computed = self._compute(stage, place(origin, layer), residual, own, gradient)
                    gradient, pending[stage, layer], params, to_shared, turn = computed
                    of_layer = gradient, pending[stage, layer]
                    gradient, pending[stage, layer] = self.stamper.computed(of_layer, event, origin, loop, events)
                    done.params[stage, layer] = params, False
                    if to_shared:
                        shared = [total + one for total, one in zip(shared, to_shared, strict=True)]
                case Fetch(stage, layer):
                    away = residuals.host[stage, layer]
                    fetched[stage, layer] = to_device(away if in_loop(origin) else together(away, entered)[0])
                case Barrier():
                    # before the next layer begins, the gather, the copy from the host and the sums must end, and this
                    # layer's weight gradients must be complete
                    gradient, pending, reduced, summed, weights, shared, fetched = together(
                        gradient, pending, reduced, summed, weights, shared, fetched
                    )
                    entered, turn = gradient, no_turn()
                    done.shards.update(self._finished(summed))
                    summed = {}
                case Loop():
                    carry = _Carry(gradient, weights, pending, reduced, shared, fetched)
                    carry, looped = self._loop(event, carry, residuals)
                    gradient, weights, pending, reduced, shared, fetched = carry
                    entered = gradient
                    done.shards.update(looped.shards)
                    done.params.update(looped.params)
                case Offload():
                    raise AssertionError(f"{event} has no place in backward")
        done.shards.update(self._finished(summed))
        return _Carry(gradient, weights, pending, reduced, shared, fetched), done

    def _gather(self, stage: int, layer: int, number: Any, entered: Tree, turn: Turn) -> Tree:
        """Gathers a layer's weights again. If what forward sent was kept, it is sent again."""
        own = self.stages[stage]
        kept = self.sent.get((stage, layer))
        prepared = own.prepare_layer(number, entered) if kept is None else kept
        return own.gather_layer(number, prepared, entered, turn)

    def _finished(self, summed: ByLayer) -> ByLayer:
        """Returns the gradients of shards, each paired with `False`, because it belongs to a single layer."""
        return {(stage, layer): (self.stages[stage].finish(own), False) for (stage, layer), own in summed.items()}

    def _loop(self, loop: Loop, carry: _Carry, residuals: Residuals) -> tuple[_Carry, _Done]:
        def body(carry: _Carry, step: tuple[jax.Array, Tree, ByLayer]) -> tuple[_Carry, _Done]:
            layer, residual, host = step
            own = Residuals({(loop.stage, 0): residual}, {}, host)
            carry, done = self.run(loop.body, carry, layer, own, loop)
            stacked = _Done(*({key: value for key, (value, _) in one.items()} for one in done))
            return _moved(carry, 1), stacked

        fetched = [event.layer for event in loop.body if isinstance(event, Fetch)]
        host = {(loop.stage, layer): residuals.host[loop.stage, loop.start + layer] for layer in fetched}
        steps = jnp.arange(loop.start, loop.stop), residuals.layers[loop.stage, loop.start], host
        carry = _moved(carry, 1 - loop.stop)
        carry, done = lax.scan(body, carry, steps, reverse=True, unroll=loop.unroll)
        stacked = ({key: (value, True) for key, value in renumbered(one, loop.start).items()} for one in done)
        return _moved(carry, loop.start - 1), _Done(*stacked)

    def _compute(
        self, number: int, layer: Any, closure: Any, weights: Tree, gradient: Tree
    ) -> tuple[Tree, Tree, Tree, list[jax.Array], Turn]:
        """Runs the backward pass of one layer. Returns the gradient of its input, what `Stage.reduce` takes, and the
        gradients of its params, of the shared floats, and of its turn."""
        stage = self.stages[number]
        shared = self.shared if stage.takes_shared else ()
        scalars, constants = (stage.of_layer(tree, layer) for tree in (self.scalars[number], stage.constants))
        again = _chosen(closure.args_res[4:], (shared, constants, no_turn()))
        closure, again, gradient = together(closure, again, gradient)
        kept, *operands = closure.args_res
        weights = _cut(stage, weights if any(_marks(kept)) else kept)
        closure = closure.replace(args_res=[weights, *operands[:3], *_put(operands[3:], again)])
        to_weights, to_slots, params, gradient, to_shared, _, turn = closure((gradient, scalars))
        if stage.frozen:  # gradients of frozen weights must neither be computed nor kept for the reduction
            to_weights, to_slots = (
                {key: own for key, own in tree.items() if key not in stage.frozen} for tree in (to_weights, to_slots)
            )
        # gradients of weights with slots, for example, may be zeros, which must not be kept for the reduction
        pending = stage.pending(to_weights, to_slots)
        pending = jax.tree.map(lambda g: () if g.dtype == jax.dtypes.float0 else g, pending)
        floats = [g for g in jax.tree.leaves(to_shared) if g.dtype != jax.dtypes.float0]
        return gradient, pending, params, floats, turn


def _moved(carry: _Carry, shift: int) -> _Carry:
    names = ("weights", "pending", "reduced", "fetched")
    return carry._replace(**{name: renumbered(getattr(carry, name), shift) for name in names})


def _pieces(by_layer: ByLayer, stages: int) -> list[list[Piece]]:
    pieces: list[list[Piece]] = [[] for _ in range(stages)]
    for (stage, layer), (tree, several) in by_layer.items():
        pieces[stage].append((layer, tree, several))
    return pieces


def _cut(stage: Stage, weights: Tree) -> Tree:
    """Applies `Stage.cut` to the weights of a layer. Marks of weights that are not needed stay as they are."""
    if stage.cut is None:
        return weights
    found = stage.cut(jax.tree.map(lambda own: None if is_mark(own) else own, weights, is_leaf=is_mark))
    return jax.tree.map(lambda own, new: own if is_mark(own) else new, weights, found, is_leaf=is_mark)


def _marks(residual: Tree) -> list[bool]:
    """Returns, for each leaf of a residual, whether it marks an operand that must be supplied again."""
    return [type(mark).__name__ == "NotSaveable" for mark in jax.tree.leaves(residual, is_leaf=is_mark)]


def _chosen(residual: Tree, operands: Tree) -> list[Any]:
    """Returns the operands that must be supplied again, in order."""
    return [value for value, mark in zip(jax.tree.leaves(operands), _marks(residual), strict=True) if mark]


def _put(residual: Tree, operands: list[Any]) -> Tree:
    """Returns the residual, with the marks of operands that must be supplied again replaced by `operands`, in order."""
    leaves, tree = jax.tree.flatten(residual, is_leaf=is_mark)
    values = iter(operands)
    marks = _marks(residual)
    return jax.tree.unflatten(tree, [next(values) if put else leaf for leaf, put in zip(leaves, marks, strict=True)])
