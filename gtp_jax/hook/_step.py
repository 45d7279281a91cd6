"""Runs a traced call of a unit as one differentiable operation, which gathers the weights in forward, and, unless they
are kept, again in backward."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.custom_derivatives import SymbolicZero

from ..chain import Remat, effects_explained, with_remat
from ..mesh import current_view, degrees
from ..ops import SlottedWeight, linear
from ..weights import CallKeys, Wire
from ._multiply import multiplies, product, ranks_know
from ._narrow import narrowed
from ._parts import in_parts
from ._products import Array, Factor, evaluate, inputs_of, is_narrow, values_of, views_of, widened
from ._ties import after, is_float, mapped_with, stamped, together
from ._trace import Program
from ._walk import Token
from ._weights import Weights

Arrays = list[Any]
Keys = list[CallKeys | None]


class Products(NamedTuple):
    """How products with weights are computed in a call.

    Attributes:
        multiplied: the numbers of the weights that the call multiplies in the recipe's formats.
        narrow: the numbers of the weights whose gradients should be summed in float32 or exchanged, but may not be,
            because no product with them was found that supports this.
    """

    multiplied: frozenset[int]
    narrow: frozenset[int]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """The inputs for which backward must return gradients.

    Attributes:
        weights: for each weight, whether its gradient is wanted.
        rest: for each other input, whether its gradient is wanted.
    """

    weights: tuple[bool, ...]
    rest: tuple[bool, ...]


def run(
    program: Program,
    shards: Arrays,
    rest: Arrays,
    token: Token,
    *,
    keys: Sequence[CallKeys | None],
    wires: Sequence[Wire],
    remat: Remat,
    keep_last: bool,
    axes: tuple[str, ...],
    wide: bool,
    owner: str,
) -> tuple[Arrays, Token, Products]:
    """Returns the outputs of a call, the token for the next unit, and how products with weights are computed.

    Args:
        program: the traced call.
        shards: the shards of the weights.
        rest: the other arrays; see `Program.arguments`.
        token: the token that `take` returned for this call.
        keys: for each weight, the keys of stochastic rounding of this call; `None` for weights without any.
        wires: the codes that the step has made of the weights. A member of a wire is named `(number,)`, after its
            weight.
        remat: the policy for what is saved for backward, as in `gtp_jax.Stack`. It does not save the outputs of
            `Parts.before`, which are computed from weights alone; backward computes them again. A nested function, such
            as the body of a scan, may save weights and what it computes from them.
        keep_last: whether gathered weights are saved for backward if no unit follows. Only backward knows whether a
            unit follows. Therefore, forward returns the gathered weights of every unit to backward, and XLA removes
            those that backward does not use. Has no effect if the gathered weights are concrete arrays.
        axes: the axes of the mesh that shard the batch.
        wide: whether the gradients of weights are computed and summed in at least float32, where products support this.
        owner: the unit, as errors name it.
    """
    parts = in_parts(program.jaxpr, len(program.placements))
    weights_of = Weights(program.placements, program.coded, program.exchanged, parts.casts)
    # the weights whose gradients are to be kept apart by rank; see [Note: one gradient per rank]
    apart = {i: one for i, one in enumerate(program.exchanged) if one is not None and current_view() == "global"}
    codes, coded = jax.tree.flatten((weights_of.encode(shards, wires), list(keys)))
    first, last = program.arguments
    views, multiplied, summed = views_of(parts.before), set[int](), set[int]()
    any_product = wide or bool(apart) or any(one is not None and one.operands is not None for one in program.coded)

    def multiply(of_weights: Keys, factor: Factor, in_matrices: Any, x: jax.Array, weight: Array) -> jax.Array | None:
        format, exchange = program.coded[factor.number], apart.get(factor.number)
        slotted = exchange is not None or (wide and is_narrow(values_of(weight).dtype))
        weight = weight if slotted else values_of(weight)
        key = jnp.zeros(2, jnp.uint32)
        if format is not None and multiplies(format, factor):
            own = of_weights[factor.number]
            key = key if own is None else own.next()
            times = lambda x, weight: product(x, weight, format, format.operands, factor, axes, key)  # noqa: E731
            multiplied.add(factor.number)
        elif exchange is not None and ranks_know(exchange, factor):
            times = lambda x, weight: product(x, weight, exchange, None, factor, axes, key)  # noqa: E731
        elif slotted and exchange is None:
            times = linear
        else:
            return None
        summed.update([factor.number] if slotted else [])
        apply = functools.partial(in_matrices, times)
        # with "everything", forward would otherwise save for backward the operand that is made from the gathered weight
        apply = jax.checkpoint(apply, prevent_cse=False) if remat == "everything" else apply
        return apply(x, weight)

    def gathered(zero: jax.Array, shards: Arrays, sent: Arrays, codes: Arrays) -> Arrays:
        """Returns the gathered weights, whose gathers wait for `zero`."""
        return weights_of.gather(zero, shards, sent, jax.tree.unflatten(coded, codes)[0])

    def before(weights: Arrays, slots: Arrays) -> Arrays:
        """Returns the outputs of `parts.before`. A view of a weight with a slot has a slot too."""
        if all(slot is None for slot in slots):
            return eval_jaxpr(parts.before, [], *weights)
        given = [w if slot is None else SlottedWeight(w, slot) for w, slot in zip(weights, slots, strict=True)]
        return evaluate(parts.before, [], given, inputs_of(parts.before), lambda *_: None)[0]

    def slots_of(weights: Arrays, wanted: _Wanted) -> Arrays:
        """Returns, for each weight, a slot of zeros for its gradient; `None` if the gradient is not wanted, or if
        neither `wide` nor `apart` asks for a slot."""

        def one(i: int, weight: jax.Array) -> jax.Array | None:
            if not wanted.weights[i] or not (wide or i in apart):
                return None
            ranks = (degrees(axes),) if i in apart else ()
            return jnp.zeros((*ranks, *weight.shape), widened(weight.dtype))

        return [one(i, weight) for i, weight in enumerate(weights)]

    def compute(codes: Arrays, own: Arrays, rest: Arrays) -> Arrays:
        _, keys = jax.tree.unflatten(coded, codes)  # fresh keys, which count products from 0
        times = functools.partial(multiply, keys) if any_product else None
        return program.evaluate(parts.after, own, rest, views, times)

    def entered(weights: Arrays, rest: Arrays) -> tuple[jax.Array, Arrays, Arrays]:
        """Returns a zero that the next unit's gather waits for, then the weights and the other inputs.

        The zero is available once the weights and the arguments of the call are. The next unit's gather must not start
        earlier. Otherwise, XLA could combine the gathers of both units, and this unit would wait for the next unit's
        weights.
        """
        zero, ready = stamped([*weights, *rest[first:last]])
        return zero, ready[: len(weights)], [*rest[:first], *ready[len(weights) :], *rest[last:]]

    @jax.custom_vjp
    def step(shards: Arrays, codes: Arrays, rest: Arrays, token: Token) -> tuple[Arrays, Token]:
        sent = weights_of.sent(shards)
        zero, weights, ready = entered(gathered(token.entered, shards, sent, codes), rest)
        own = before(weights, [None] * len(weights))
        return mapped_with((compute(codes, own, ready), Token(zero, token.reduced)), [*shards, *rest, *token])

    def forward(shards: Any, codes: Any, rest: Any, token: Any) -> Any:
        wanted = _Wanted(*(tuple(leaf.perturbed for leaf in leaves) for leaves in (shards, rest)))
        shards, codes, rest = ([leaf.value for leaf in leaves] for leaves in (shards, codes, rest))
        token = Token(*(leaf.value for leaf in token))
        sent = weights_of.sent(shards)
        zero, weights, ready = entered(gathered(token.entered, shards, sent, codes), rest)
        kept = keep_last and all(isinstance(weight, Tracer) for weight in weights)
        own = before(weights, slots_of(weights, wanted))
        computed = with_remat(functools.partial(compute, codes), remat)
        with effects_explained(owner):
            y, closure = jax.vjp(computed, own, ready, saveable_args=(False, True))
        outputs = mapped_with((y, Token(zero, token.reduced)), [*shards, *rest, *token])
        return outputs, (closure, shards, sent, codes, weights if kept else None, wanted)

    def backward(residuals: Any, cotangents: Any) -> Any:
        closure, shards, sent, codes, weights, wanted = residuals
        dy, ordered = cotangents
        dy = [_instantiated(g) for g in dy]
        if weights is None or not _is_zero(ordered.entered):
            # if no next unit has sent back a zero to wait for, gather once the gradients of the outputs are available
            zero = stamped(dy)[0] if _is_zero(ordered.entered) else ordered.entered
            weights = gathered(zero, shards, sent, codes)
        handed, ready = stamped([*weights, *dy])
        weights, dy = ready[: len(weights)], ready[len(weights) :]
        own, through = jax.vjp(before, weights, slots_of(weights, wanted))
        closure, dy = _together(closure, dy)
        saved = jax.tree.leaves(closure.args_res[0], is_leaf=_is_mark)
        kept = [new if _is_mark(old) else old for new, old in zip(jax.tree.leaves(own), saved, strict=True)]
        to_own, to_rest = closure.replace(args_res=[kept, *closure.args_res[1:]])(dy)
        to_weights, to_slots = through(to_own)
        trained = [i for i, own in enumerate(wanted.weights) if own]
        kept_apart = [i for i in trained if i in apart and i in summed]
        for i in summed.difference(apart):
            if to_slots[i] is not None:
                to_weights[i] = to_weights[i].astype(to_slots[i].dtype) + to_slots[i]
        late = _late(ordered.reduced, [*(to_weights[i] for i in trained), *(to_slots[i] for i in kept_apart)])
        gradients, ranks = late[: len(trained)], late[len(trained) :]
        found = weights_of.reduce(
            dict(zip(trained, gradients, strict=True)), dict(zip(kept_apart, ranks, strict=True)), axes
        )
        done, found = stamped([found[i] for i in trained])
        reduced: list[Any] = [None] * len(shards)
        for i, gradient in zip(trained, found, strict=True):
            reduced[i] = gradient.astype(shards[i].dtype)  # cast last: XLA may pass the uncast gradient to an optimizer
        to_rest = [g if own and is_float(g) else None for g, own in zip(to_rest, wanted.rest, strict=True)]
        return reduced, None, to_rest, Token(handed, done)

    step.defvjp(forward, backward, symbolic_zeros=True)
    outputs, token = step(shards, codes, rest, token)
    count = len(program.placements)
    inputs = [frozenset([i]) if i < count else None for i in range(len(program.jaxpr.invars))]
    narrow = narrowed(program.jaxpr, inputs) - summed if wide else set[int]()
    narrow |= apart.keys() - summed
    return outputs, token, Products(frozenset(multiplied), frozenset(narrow))


def _late(reduced: Any, gradients: Arrays) -> Arrays:
    """Makes gradients of weights wait until the next unit's gradients are reduced, and returns them. Otherwise, XLA
    could combine the reductions of both units, and the next unit's reduction would wait for these gradients."""
    if _is_zero(reduced) or not gradients:
        return gradients
    return after(reduced, gradients)


def _together(closure: Any, dy: Arrays) -> tuple[Any, Arrays]:
    """Ties both arguments, so that neither is available before the other, and returns them. Otherwise, XLA could move
    backward's recomputation into forward."""
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
    """Returns whether a residual of `jax.vjp` was not saved, and is only a mark. Its value must be supplied again, or
    is not needed."""
    return type(leaf).__name__ in ("NotSaveable", "NotNeeded")
