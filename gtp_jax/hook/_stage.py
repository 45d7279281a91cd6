"""Makes a stage of a chain from a traced call of a unit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from ..chain import Outputs, Remat, Schedule, Stage, is_float, joined, run, separated, with_remat
from ..mesh import current_view, degrees
from ..ops import SlottedWeight, linear
from ..weights import CallKeys, Scaling, Wire
from ._maxima import with_maxima, without_maxima
from ._multiply import multiplies, product, ranks_know
from ._narrow import narrowed
from ._parts import in_parts
from ._products import Array, Factor, Multiply, evaluate, inputs_of, is_narrow, values_of, views_of, widened
from ._trace import Program
from ._weights import Weights

Arrays = list[Any]
# For each weight of a call, how its products are scaled by amaxes of earlier steps; `None` if they are not. Between the
# start of a call and its computation, slots are in float32, and each is used once.
Scalings = Sequence[Scaling | None]
ByNumber = dict[int, Any]  # by the number of a weight


class Products(NamedTuple):
    """How products with weights are computed in a call.

    Attributes:
        multiplied: the numbers of the weights that the call multiplies in the recipe's formats.
        narrow: the numbers of the weights whose gradients should be summed in float32 or exchanged, but may not be,
            because no product with them was found that supports this.
    """

    multiplied: frozenset[int]
    narrow: frozenset[int]


class Sent(NamedTuple):
    """The arrays of a call that are gathered.

    Attributes:
        shards: the shards of the weights, by number.
        codes: the codes of the weights that are quantized.
    """

    shards: ByNumber
    codes: tuple[Wire, ...]


class StagedCall:
    """A call of a unit, without its arrays.

    Args:
        program: the traced call.
        remat: the policy for what is saved for backward. It does not save what is computed from weights alone.
        axes: the axes of the mesh that shard the batch.
        sequence: the axes that divide the tokens of each example.
        wide: whether the gradients of weights are computed and summed in at least float32, where products support this.
        owner: the unit, as errors name it.
    """

    def __init__(
        self,
        program: Program,
        *,
        remat: Remat,
        axes: tuple[str, ...],
        sequence: tuple[str, ...],
        wide: bool,
        owner: str,
    ) -> None:
        self.program, self.owner = program, owner
        self.remat: Remat = remat
        self._axes, self._sequence, self._wide = axes, sequence, wide
        self._parts = in_parts(program.jaxpr, len(program.placements))
        self._weights = Weights(program.placements, program.coded, program.exchanged, self._parts.casts)
        exchanged = program.exchanged if current_view() == "global" else ()
        # how the gradients that are kept apart by rank are summed, by number; see [Note: one gradient per rank]
        self._apart = {i: one for i, one in enumerate(exchanged) if one is not None}
        # what tracing the call has found so far: the numbers of the weights that are multiplied in formats, of those
        # with a product whose gradient arrives in a slot, and of those that are used in another way too
        self._multiplied, self._summed, self._used = set[int](), set[int](), set[int]()

    def sent(self, shards: Sequence[Any], wires: Sequence[Wire], scaling: Scalings) -> Sent:
        """Returns what the call gathers, given the shards of its weights, the codes that the step has made, and how
        products are scaled."""
        return Sent(dict(enumerate(shards)), self._weights.encode(shards, wires, scaling))

    def prepare(self, sent: Sent) -> Arrays:
        """Returns the shards that are gathered as they are, in the dtypes in which they are gathered."""
        return self._weights.sent(list(sent.shards.values()))

    def gather(self, shards: ByNumber, sent: Sent, prepared: Arrays) -> ByNumber:
        """Returns the gathered weights. They are differentiable with respect to `shards`."""
        each = [shards[i] for i in range(len(shards))]
        return dict(enumerate(self._weights.gather(each, prepared, sent.codes)))

    def slots(self, weights: ByNumber) -> ByNumber:
        """Returns a slot of zeros for the gradient of each weight that `wide` or a reduction apart by rank asks for."""

        def one(i: int, weight: jax.Array) -> jax.Array:
            ranks = (degrees(self._axes),) if i in self._apart else ()
            narrow = i in self._apart and self._apart[i].wire is None and not self._wide
            return jnp.zeros((*ranks, *weight.shape), weight.dtype if narrow else widened(weight.dtype))

        return {i: one(i, weight) for i, weight in weights.items() if self._wide or i in self._apart}

    def pending(self, to_weights: ByNumber, to_slots: ByNumber) -> tuple[ByNumber, ByNumber]:
        """Returns the gradients to be summed over ranks, given those of weights and of slots: first those that are sums
        over the ranks already (in global view) or this rank's own, then those that are kept apart by rank."""
        apart = {i: slot for i, slot in to_slots.items() if i in self._apart and i in self._summed}
        direct = {i: own for i, own in to_weights.items() if i not in apart or i in self._used}
        for i, slot in to_slots.items():
            if i in self._summed and i not in self._apart:
                direct[i] = direct[i].astype(slot.dtype) + slot if i in self._used else slot
        return direct, apart

    def compute(
        self, weights: ByNumber, slots: ByNumber, rest: Arrays, keys: Sequence[Any], scaling: Scalings
    ) -> Arrays:
        """Returns the outputs of the program."""

        def call(weights: ByNumber, slots: ByNumber, rest: Arrays, keys: Sequence[Any], scaling: Scalings) -> Arrays:
            given = [w if i not in slots else SlottedWeight(w, slots[i]) for i, w in sorted(weights.items())]
            own = [None if one is None else with_maxima(one) for one in scaling]
            return self._after(self._before(given), rest, functools.partial(self._multiply, keys, own))

        return with_remat(call, self.remat)(weights, slots, rest, keys, scaling)

    def reduce(self, gradients: tuple[ByNumber, ByNumber]) -> ByNumber:
        """Returns the gradients of shards, given what `pending` returns."""
        return self._weights.reduce(*gradients, self._axes)

    def finish(self, reduced: ByNumber) -> ByNumber:
        """Returns the gradients of all shards, `None` for those of weights that are not differentiated."""
        return {i: reduced.get(i) for i in range(len(self.program.placements))}

    def products(self) -> Products:
        """Returns how products are computed, once the call has been traced."""
        program, summed = self.program, self._summed
        count = len(program.placements)
        inputs = [frozenset([i]) if i < count else None for i in range(len(program.jaxpr.invars))]
        narrow = narrowed(program.jaxpr, inputs) - summed if self._wide else set[int]()
        narrow |= {i for i, one in self._apart.items() if one.wire is not None} - summed
        return Products(frozenset(self._multiplied), frozenset(narrow))

    def _before(self, weights: Sequence[Array]) -> Arrays:
        """Returns what the call computes from weights alone. A view of a weight with a slot has a slot too."""
        before = self._parts.before
        made = [v for v in before.outvars if v not in before.invars]
        alone = before.replace(outvars=made)

        def compute(weights: Sequence[Array]) -> Arrays:
            if not any(isinstance(weight, SlottedWeight) for weight in weights):
                return eval_jaxpr(alone, [], *weights)
            return evaluate(alone, [], weights, inputs_of(alone), lambda *_: None, self._used)[0]

        found = dict(zip(before.invars, weights, strict=True))
        if made:  # recomputed in backward, whatever the policy, because it is as large as the weights
            policy = jax.checkpoint_policies.nothing_saveable
            own = jax.checkpoint(compute, policy=policy, prevent_cse=False)(list(weights))
            found |= dict(zip(made, own, strict=True))
        return [found[v] for v in before.outvars]  # pyright: ignore[reportArgumentType]

    def _after(self, own: Arrays, rest: Arrays, multiply: Multiply) -> Arrays:
        """Returns the outputs of the program, given what `_before` returns."""
        coded = any(one is not None and one.operands is not None for one in self.program.coded)
        times = multiply if self._wide or self._apart or coded else None
        views = views_of(self._parts.before)
        return self.program.evaluate(self._parts.after, own, rest, views, times, self._used)

    def _multiply(
        self,
        keys: Sequence[CallKeys | None],
        scaling: Scalings,
        factor: Factor,
        in_matrices: Callable[..., Any],
        x: Any,
        weight: Array,
    ) -> jax.Array | None:
        """Computes a product with a weight; see `Multiply`."""
        program, apart, axes = self.program, self._apart, (self._axes, self._sequence)
        format, exchange = program.coded[factor.number], apart.get(factor.number)
        by_rank = self._wide or (exchange is not None and exchange.wire is not None)
        slotted = exchange is not None or (self._wide and is_narrow(values_of(weight).dtype))
        weight = weight if slotted else values_of(weight)
        key = jnp.zeros(2, jnp.uint32)
        if format is not None and multiplies(format, factor):
            own, scales = keys[factor.number], scaling[factor.number]
            key = key if own is None else own.next()
            scales = None if scales is None else without_maxima(scales)
            times = lambda x, weight: product(x, weight, format, format.operands, factor, *axes, key, scales)  # noqa: E731
            self._multiplied.add(factor.number)
        elif exchange is not None and ranks_know(exchange, factor) and (by_rank or _of_examples(x, program)):
            times = lambda x, weight: product(x, weight, exchange, None, factor, *axes, key)  # noqa: E731
        elif slotted and exchange is None:
            times = functools.partial(linear, precision=factor.precision)
        else:
            return None
        self._summed.update([factor.number] if slotted else [])
        apply = functools.partial(in_matrices, times)
        # with "everything", forward would otherwise save for backward the operand that is made from the gathered weight
        apply = with_remat(apply, "matmuls") if self.remat == "everything" else apply
        return apply(x, weight)


def stage_of(call: StagedCall, sent: Sent, **options: Any) -> Stage:
    """Returns a call as a stage of a chain.

    Args:
        call: the call.
        sent: what it gathers, as `StagedCall.sent` returns it.
        options: further attributes of the stage, such as `shards` and `apply`.
    """
    return Stage(
        gather_inputs=sent,
        prepare=call.prepare,
        gather=call.gather,
        slots=call.slots,
        pending=call.pending,
        reduce=call.reduce,
        finish=call.finish,
        trains_some=True,
        travels=bool(call.program.placements),
        name=call.owner,
        **options,
    )


def run_alone(
    call: StagedCall,
    sent: Sent,
    scaling: Scalings,
    keys: Sequence[CallKeys | None],
    rest: Arrays,
    *,
    keep: bool = False,
) -> Arrays:
    """Returns the outputs of a call that is not ordered among others. Nothing that it saves is moved to the host.

    Args:
        call: the call.
        sent: what it gathers.
        scaling: how its products are scaled.
        keys: for each weight, the keys of stochastic rounding of this call; `None` for weights without any.
        rest: the other arrays; see `Program.arguments`.
        keep: whether the gathered weights are kept for backward. Otherwise, backward gathers them again.
    """
    floats = list(map(is_float, rest))
    params, others = separated(rest, floats)

    def apply(weights: Any, slots: Any, params: Any, x: Any, shared: Any, constants: Any, turn: Any) -> Any:
        del x, shared, turn
        (own, scaling), (keys, others) = params, constants
        return call.compute(weights, slots, joined(own, others, floats), keys, scaling), Outputs()

    given, constants = (params, list(scaling)), (list(keys), others)
    stage = stage_of(call, sent, shards=sent.shards, params=given, constants=constants, apply=apply)
    return run([stage], [], Schedule(keep_gathered="all" if keep else 0))[0]


def _of_examples(x: jax.Array, program: Program) -> bool:
    """Returns whether the first dimension of a factor of a product consists of the examples of the call, or of the
    tokens of one example after another."""
    return x.ndim > 1 and (x.shape[0] == program.examples or (x.ndim == 2 and x.shape[0] % program.examples == 0))
