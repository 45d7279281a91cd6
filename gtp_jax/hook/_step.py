"""Runs a traced call of a unit as one differentiable operation, which gathers the weights in both passes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.custom_derivatives import SymbolicZero

from ..chain import Remat, with_remat
from ._codes import multiplies, product
from ._parts import in_parts
from ._products import Factor, views_of
from ._ties import after, is_float, mapped_with, stamped, together
from ._trace import Program
from ._walk import Token
from ._weights import Weights

Arrays = list[Any]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """The inputs whose gradients are wanted.

    Attributes:
        weights: whether the gradient of each weight is wanted.
        rest: whether the gradient of each other input is wanted.
    """

    weights: tuple[bool, ...]
    rest: tuple[bool, ...]


def run(
    program: Program,
    shards: Arrays,
    rest: Arrays,
    token: Token,
    *,
    remat: Remat,
    keep_last: bool,
    batch: tuple[str, ...],
) -> tuple[Arrays, Token, frozenset[int]]:
    """Returns the outputs of a call, the token for the next unit, and the numbers of the weights that are multiplied
    in a format.

    Args:
        program: the traced call.
        shards: the shards of the weights.
        rest: the other input arrays.
        token: the token of the previous unit.
        remat: the policy for what is saved for backward, as in `gtp_jax.Stack`. Gathered weights are not saved, nor is
            what is computed from them alone.
        keep_last: whether gathered weights are saved for backward if no unit follows. Only backward knows whether one
            follows, so forward passes them on for every unit, and XLA removes those that backward does not use.
        batch: the mesh axes that shard the batch.
    """
    parts = in_parts(program.jaxpr, len(program.placements))
    weights_of = Weights(program.placements, program.coded, parts.casts)
    codes, wires = jax.tree.flatten(weights_of.encode(shards))
    first, last = program.arguments
    views, multiplied = views_of(parts.before), set[int]()
    any_product = any(one is not None and one.operands is not None for one in program.coded)

    def multiply(factor: Factor, in_matrices: Any, x: jax.Array, weight: jax.Array) -> jax.Array | None:
        coded = program.coded[factor.number]
        if coded is None or not multiplies(coded, factor):
            return None
        multiplied.add(factor.number)
        apply = functools.partial(in_matrices, lambda x, weight: product(x, weight, coded, factor, batch))
        # otherwise backward would keep the operand that is made from the gathered weight
        apply = jax.checkpoint(apply, prevent_cse=False) if remat == "everything" else apply
        return apply(x, weight)

    def gathered(zero: jax.Array, shards: Arrays, codes: Arrays) -> Arrays:
        """Returns the gathered weights; the gathers wait for `zero`."""
        return weights_of.gather(zero, shards, jax.tree.unflatten(wires, codes))

    def before(weights: Arrays) -> Arrays:
        return eval_jaxpr(parts.before, [], *weights)

    def compute(own: Arrays, rest: Arrays) -> Arrays:
        return program.evaluate(parts.after, own, rest, views, multiply if any_product else None)

    def entered(weights: Arrays, rest: Arrays) -> tuple[jax.Array, Arrays, Arrays]:
        """Returns a zero for the next unit, and the inputs, tied to it.

        The next unit's gather may start once this unit has its weights and inputs, but not earlier. Otherwise, XLA
        could combine the gathers of both units, which would then wait for one another.
        """
        zero, ready = stamped([*weights, *rest[first:last]])
        return zero, ready[: len(weights)], [*rest[:first], *ready[len(weights) :], *rest[last:]]

    @jax.custom_vjp
    def step(shards: Arrays, codes: Arrays, rest: Arrays, token: Token) -> tuple[Arrays, Token]:
        zero, weights, ready = entered(gathered(token.entered, shards, codes), rest)
        return mapped_with((compute(before(weights), ready), Token(zero, token.reduced)), [*shards, *rest, *token])

    def forward(shards: Any, codes: Any, rest: Any, token: Any) -> Any:
        wanted = _Wanted(*(tuple(leaf.perturbed for leaf in leaves) for leaves in (shards, rest)))
        shards, codes, rest = ([leaf.value for leaf in leaves] for leaves in (shards, codes, rest))
        token = Token(*(leaf.value for leaf in token))
        zero, weights, ready = entered(gathered(token.entered, shards, codes), rest)
        kept = keep_last and all(isinstance(weight, Tracer) for weight in weights)
        y, closure = jax.vjp(with_remat(compute, remat), before(weights), ready, saveable_args=(False, True))
        outputs = mapped_with((y, Token(zero, token.reduced)), [*shards, *rest, *token])
        return outputs, (closure, shards, codes, weights if kept else None, wanted)

    def backward(residuals: Any, cotangents: Any) -> Any:
        closure, shards, codes, weights, wanted = residuals
        dy, ordered = cotangents
        dy = [_instantiated(g) for g in dy]
        if weights is None or not _is_zero(ordered.entered):
            # if the next unit gives no order, gather only once the gradient of the output is available
            weights = gathered(stamped(dy)[0] if _is_zero(ordered.entered) else ordered.entered, shards, codes)
        handed, ready = stamped([*weights, *dy])
        weights, dy = ready[: len(weights)], ready[len(weights) :]
        own, through = jax.vjp(before, weights)
        closure, dy = _together(closure, dy)
        kept = [new if _is_mark(old) else old for new, old in zip(own, closure.args_res[0], strict=True)]
        to_own, to_rest = closure.replace(args_res=[kept, *closure.args_res[1:]])(dy)
        (to_weights,) = through(to_own)
        trained = [i for i, own in enumerate(wanted.weights) if own]
        late = zip(trained, _late(ordered.reduced, [to_weights[i] for i in trained]), strict=True)
        found = [weights_of.scatter(i, gradient).astype(shards[i].dtype) for i, gradient in late]
        done, found = stamped(found)
        reduced: list[Any] = [None] * len(shards)
        for i, gradient in zip(trained, found, strict=True):
            reduced[i] = gradient
        to_rest = [g if own and is_float(g) else None for g, own in zip(to_rest, wanted.rest, strict=True)]
        return reduced, None, to_rest, Token(handed, done)

    step.defvjp(forward, backward, symbolic_zeros=True)
    outputs, token = step(shards, codes, rest, token)
    return outputs, token, frozenset(multiplied)


def _late(reduced: Any, gradients: Arrays) -> Arrays:
    """Returns gradients of weights, made to wait until the next unit's gradients are reduced. Otherwise, XLA would
    combine the reductions of both units, which would then wait for one another."""
    if _is_zero(reduced) or not gradients:
        return gradients
    least = min(range(len(gradients)), key=lambda i: gradients[i].size)
    gradients[least] = after(reduced, [gradients[least]])[0]  # a select reads and writes it: take a small one
    return together(gradients)


def _together(closure: Any, dy: Arrays) -> tuple[Any, Arrays]:
    """Returns both arguments, neither of which is available before both are. Otherwise, XLA would move backward's
    recomputation into forward."""
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
    """Returns whether a residual was not saved and must be supplied again."""
    return type(leaf).__name__ == "NotSaveable"
