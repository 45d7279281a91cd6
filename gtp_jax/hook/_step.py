"""A traced call of a unit as one differentiable operation, whose weights are gathered in both passes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.custom_derivatives import SymbolicZero

from ..chain import Remat, with_remat
from ._movement import gather, scatter
from ._parts import cast, in_parts
from ._ties import after, is_float, stamped, together
from ._trace import Program
from ._walk import Token

Arrays = list[Any]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Whether a gradient is wanted, of each weight and of each other input."""

    weights: tuple[bool, ...]
    rest: tuple[bool, ...]


def run(
    program: Program, shards: Arrays, rest: Arrays, token: Token, *, remat: Remat, keep_last: bool
) -> tuple[Arrays, Token]:
    """Returns the outputs of a call, and the token for the next unit.

    Args:
        program: what is computed.
        shards: of the weights.
        rest: the other arrays.
        token: of the unit before.
        remat: names what is kept for backward, as in `gtp_jax.Stack`. Gathered weights are not, nor is what is computed
            from them alone.
        keep_last: whether gathered weights are kept for backward if no unit follows. Only backward knows; what forward
            hands it in vain of other units, XLA removes from the program.
    """
    parts = in_parts(program.jaxpr, len(program.placements))
    first, last = program.arguments

    def gathered(zero: jax.Array, shards: Arrays) -> Arrays:
        """Returns the weights, gathered no sooner than `zero`."""
        ready = after(zero, cast(shards, parts.casts))
        return [gather(shard, placement) for shard, placement in zip(ready, program.placements, strict=True)]

    def before(weights: Arrays) -> Arrays:
        return eval_jaxpr(parts.before, [], *weights)

    def compute(own: Arrays, rest: Arrays) -> Arrays:
        return program.evaluate(parts.after, own, rest)

    def entered(weights: Arrays, rest: Arrays) -> tuple[jax.Array, Arrays, Arrays]:
        """Returns a zero for the next unit, which may be gathered as soon as this one begins: gathers that XLA could
        combine would wait for one another."""
        zero, ready = stamped([*weights, *rest[first:last]])
        return zero, ready[: len(weights)], [*rest[:first], *ready[len(weights) :], *rest[last:]]

    @jax.custom_vjp
    def step(shards: Arrays, rest: Arrays, token: Token) -> tuple[Arrays, Token]:
        zero, weights, rest = entered(gathered(token.entered, shards), rest)
        return compute(before(weights), rest), Token(zero, token.reduced)

    def forward(shards: Any, rest: Any, token: Any) -> Any:
        wanted = _Wanted(*(tuple(leaf.perturbed for leaf in leaves) for leaves in (shards, rest)))
        shards, rest = ([leaf.value for leaf in leaves] for leaves in (shards, rest))
        token = Token(*(leaf.value for leaf in token))
        zero, weights, rest = entered(gathered(token.entered, shards), rest)
        kept = keep_last and all(isinstance(weight, Tracer) for weight in weights)
        y, closure = jax.vjp(with_remat(compute, remat), before(weights), rest, saveable_args=(False, True))
        return (y, Token(zero, token.reduced)), (closure, shards, weights if kept else None, wanted)

    def backward(residuals: Any, cotangents: Any) -> Any:
        closure, shards, weights, wanted = residuals
        dy, ordered = cotangents
        dy = [_instantiated(g) for g in dy]
        if weights is None or not _is_zero(ordered.entered):
            # where no unit behind has said when, not before this unit's own turn
            weights = gathered(stamped(dy)[0] if _is_zero(ordered.entered) else ordered.entered, shards)
        handed, ready = stamped([*weights, *dy])
        weights, dy = ready[: len(weights)], ready[len(weights) :]
        own, through = jax.vjp(before, weights)
        closure, dy = _together(closure, dy)
        kept = [new if _is_mark(old) else old for new, old in zip(own, closure.args_res[0], strict=True)]
        to_own, to_rest = closure.replace(args_res=[kept, *closure.args_res[1:]])(dy)
        (to_weights,) = through(to_own)
        trained = [i for i, own in enumerate(wanted.weights) if own]
        if not _is_zero(ordered.reduced):  # the unit behind has its gradients reduced by then: one unit late
            to_rest[first:last] = after(ordered.reduced, to_rest[first:last])
        found = [scatter(to_weights[i], program.placements[i]).astype(shards[i].dtype) for i in trained]
        done, found = stamped(found)
        reduced: list[Any] = [None] * len(shards)
        for i, gradient in zip(trained, found, strict=True):
            reduced[i] = gradient
        to_rest = [g if own and is_float(g) else None for g, own in zip(to_rest, wanted.rest, strict=True)]
        return reduced, to_rest, Token(handed, done)

    step.defvjp(forward, backward, symbolic_zeros=True)
    return step(shards, rest, token)


def _together(closure: Any, dy: Arrays) -> tuple[Any, Arrays]:
    """Returns both, available together: XLA would otherwise compute in forward what backward computes again."""
    leaves, tree = jax.tree.flatten((closure, dy))
    return jax.tree.unflatten(tree, together(leaves))


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, SymbolicZero)


def _instantiated(cotangent: Any) -> Any:
    if not _is_zero(cotangent):
        return cotangent
    integer = cotangent.dtype == jax.dtypes.float0
    return (np if integer else jnp).zeros(cotangent.shape, cotangent.dtype)


def _is_mark(leaf: Any) -> bool:
    """Returns whether a residual must be supplied again."""
    return type(leaf).__name__ == "NotSaveable"
