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
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import PyTree, Shaped

from ..ops import call_with_zeros
from ..weights import Apart
from ._backward import backward
from ._events import Loop
from ._forward import Residuals, forward
from ._plan import plan
from ._schedule import Schedule
from ._stage import Outputs, Stage
from ._ties import mapped_with

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
    divides = [stage.divide is not None for stage in stages]
    offload = [stage.offload for stage in stages]
    events = plan(lengths, schedule, only_casts=only_casts, offload=offload, divides=divides)
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
        y, outputs, _ = forward(with_arrays(shards, params, given), x, alone, shared, differentiated=False)
        return mapped_with((y, outputs), jax.tree.leaves((shards, params, x, shared)))

    def fwd(shards: Tree, given: Tree, params: Tree, x: Tree, shared: Tree):
        trained = _trained(bare, shards, params, x, shared)
        shards, given, params, x, shared = jax.tree.map(lambda leaf: leaf.value, (shards, given, params, x, shared))
        y, outputs, residuals = forward(trained.of(with_arrays(shards, params, given)), x, events, shared)
        found = mapped_with((y, outputs), jax.tree.leaves((shards, params, x, shared)))
        kept = Residuals(*({key: own for key, own in one.items() if key[0] >= trained.first} for one in residuals))
        return found, (shards, given, params, shared, kept, trained)

    def bwd(saved: Tree, gradients: tuple[Tree, list[Outputs]]):
        shards, given, params, shared, residuals, trained = saved
        gradient, outputs = jax.tree.map(_instantiated, gradients)
        scalars = [one.scalars for one in outputs]
        own = trained.of(with_arrays(shards, params, given))
        computed = backward(own, residuals, gradient, events, shared, scalars, trained.first)
        # cast only here, so that the gradients of all layers are stacked in the dtype in which they were summed
        cast = lambda shard, g: None if g is None else g.astype(shard.dtype)  # noqa: E731
        each = zip(shards, computed.shards, strict=True)
        of_shards = [None if found is None else jax.tree.map(cast, one, found) for one, found in each]
        return of_shards, None, computed.params, computed.x, computed.shared  # gradients of gather_inputs go to shards

    chain.defvjp(fwd, bwd, symbolic_zeros=True)
    looped = {event.stage for event in events.forward if isinstance(event, Loop)}
    given = [
        (_joined(stage.gather_inputs) if number in looped else stage.gather_inputs, stage.constants)
        for number, stage in enumerate(stages)
    ]
    return call_with_zeros(
        chain, [stage.shards for stage in stages], given, [stage.params for stage in stages], x, shared
    )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Trained:
    """The parts of a chain that are differentiated.

    Attributes:
        frozen: for each stage, the keys of the weights that are not.
        first: the first stage for which a gradient is needed. Backward ends with it.
    """

    frozen: tuple[frozenset[Any], ...]
    first: int

    def of(self, stages: Sequence[Stage]) -> list[Stage]:
        """Returns the stages, with these weights frozen too."""
        each = zip(stages, self.frozen, strict=True)
        return [dataclasses.replace(stage, frozen=stage.frozen | keys) for stage, keys in each]


def _trained(stages: Sequence[Stage], shards: Tree, params: Tree, x: Tree, shared: Tree) -> _Trained:
    """Returns what is differentiated, given the arguments of a chain as the rules of a `custom_vjp` receive them."""
    frozen = [
        frozenset(key for key, leaf in own.items() if not leaf.perturbed) if stage.trains_some else frozenset[Any]()
        for stage, own in zip(stages, shards, strict=True)
    ]
    reads = [
        (own, floats, shared if stage.takes_shared else (), () if number else x)
        for number, (stage, own, floats) in enumerate(zip(stages, shards, params, strict=True))
    ]
    wanted = (number for number, own in enumerate(reads) if any(leaf.perturbed for leaf in jax.tree.leaves(own)))
    return _Trained(tuple(frozen), next(wanted, 0))


def _instantiated(cotangent: Any) -> Any:
    """Returns a gradient as an array, if JAX has passed a symbolic zero instead of it."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    shape: Any = cotangent.shape
    dtype: Any = cotangent.dtype
    integer = dtype == jax.dtypes.float0
    return (np if integer else jnp).zeros(shape, dtype)


def _joined(inputs: Tree) -> Tree:
    """Returns the inputs with each `Apart` joined into one array, once for all iterations of a loop."""
    is_apart = lambda leaf: isinstance(leaf, Apart)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.joined() if is_apart(leaf) else leaf, inputs, is_leaf=is_apart)
