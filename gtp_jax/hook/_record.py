"""Records the walk of a model, and runs its calls of units as one chain.

[Note: recorded walks]
In traced code, the outermost call of a model's method is traced to a jaxpr first. In it, a call of a unit is one
equation (`gtp_unit`), whose parameter is the traced call. The jaxpr is then split at these equations (`_split`), and
they run as the stages of a chain, whose plan has all calls: while a unit computes, the weights of the next one are
gathered, and in backward the gradients of the last one are reduced. Equations between two calls belong to the second.

If the jaxpr cannot be split, its equations are evaluated in order, and each call gathers its weights when it runs. So
does a call outside of a walk: in another trace, such as the body of a scan, or in code that is not traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import Jaxpr, Literal, Primitive

from ..chain import OFFLOADED, Outputs, Schedule, run
from ._copies import OnCopies
from ._forward_mode import refused_in_forward_mode
from ._maxima import without_maxima
from ._recording import current_recording, recording
from ._rows import is_mapped
from ._split import Part, Split, can_split, split, variables
from ._stage import StagedCall, run_alone, stage_of
from ._trace import Traced
from ._walk import FIRST, NOT_STAGED, is_under_way, reason_alone

_unit = Primitive("gtp_unit")
_unit.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False)
class _Marker:
    """The parameter of the equation of a call.

    Attributes:
        call: the call.
        before: the number of operands that are computed before the chain: the shards of the weights, then the codes,
            then the scaling of products.
        tree: the structure of the operands: what is gathered, scaling, keys, other arrays.
        schedule: how the call is ordered among others.
        note: a function that completes the record of the call.
        refused: a function that returns the context in which the call runs (`forward_mode_refused`).
        source: the path of the unit, if the call moves activations to the host's memory.
    """

    call: StagedCall
    before: int
    tree: Any
    schedule: Schedule
    note: Callable[..., None]
    refused: Callable[[], contextlib.AbstractContextManager[str]]
    source: str


@_unit.def_abstract_eval
def _(*operands: Any, marker: _Marker) -> list[Any]:
    del operands
    return [v.aval for v in marker.call.program.jaxpr.outvars]


def can_record() -> bool:
    """Returns whether the call of a model begins a recording: in traced code, outside of a walk."""
    return not is_under_way() and isinstance(jnp.zeros(()), Tracer)


def call_or_mark(
    call: Traced,
    staged: StagedCall,
    schedule: Schedule,
    *,
    note: Callable[..., None],
    refused: Callable[[], contextlib.AbstractContextManager[str]],
    source: str,
) -> Sequence[Any]:
    """Returns the outputs of a call of a unit. If a walk is recorded in this trace, only records the call.

    Args:
        call: the traced call.
        staged: the same call, without its arrays.
        schedule: how the call is ordered among others.
        note: a function that completes the record of the call.
        refused: a function that returns the context in which the call runs (`forward_mode_refused`).
        source: the path of the unit, if the call moves activations to the host's memory.
    """
    scaling = [None if one is None else without_maxima(one) for one in call.scaling]
    operands = staged.sent(call.weights, call.wires, scaling), scaling, call.keys, call.rest
    leaves, tree = jax.tree.flatten(operands)
    marker = _Marker(staged, len(jax.tree.leaves(operands[:2])), tree, schedule, note, refused, source)
    return _unit.bind(*leaves, marker=marker) if is_recording() else _alone(marker, leaves, reason_alone())


def is_recording() -> bool:
    """Returns whether a walk is recorded in this trace."""
    return current_recording() is not None and is_under_way()


def recorded(method: Callable[..., Any], holder: Any, args: Any, kwargs: Any, given: Any) -> Any:
    """Records `method(holder, *args, **kwargs)`, runs what it has recorded, and returns the result.

    Args:
        method: the method.
        holder: the module.
        args: positional arguments.
        kwargs: keyword arguments.
        given: as in `traced`.
    """
    call = OnCopies(method, holder, args, kwargs, given)
    inputs = {i: value for i, value in enumerate(call.values) if isinstance(value, Tracer)}
    arguments = [i for i, leaf in enumerate(call.arguments) if isinstance(leaf, Tracer)]
    within = functools.partial(recording, is_mapped((args, kwargs)))
    closed, effects = call.trace(inputs, arguments, within)
    jaxpr, arrays = closed.jaxpr, (*closed.consts, *inputs.values(), *(call.arguments[i] for i in arguments))
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), arrays, strict=True))
    if any(map(_is_call, jaxpr.eqns)) and can_split(jaxpr, _is_call, _before):
        _run(split(jaxpr, _is_call, _before), known)
    else:
        _run_in_order(jaxpr, known)
    return effects.repeat([_value(v, known) for v in jaxpr.outvars], stored=lambda _, value: value)


def _is_call(eqn: Any) -> bool:
    return eqn.primitive is _unit


def _before(eqn: Any) -> Sequence[Any]:
    return eqn.invars[: eqn.params["marker"].before]


def _run_in_order(jaxpr: Jaxpr, known: dict[Any, Any]) -> None:
    """Evaluates the equations in order. Each call gathers its weights when it runs."""
    waiting: list[Any] = []
    for eqn in jaxpr.eqns:
        if not _is_call(eqn):
            waiting.append(eqn)
            continue
        _evaluate(waiting, known)
        waiting = []
        found = _alone(eqn.params["marker"], [_value(v, known) for v in eqn.invars], NOT_STAGED)
        known.update(zip(eqn.outvars, found, strict=True))
    _evaluate(waiting, known)


def _alone(marker: _Marker, operands: Sequence[Any], reason: str) -> Sequence[Any]:
    """Returns the outputs of a call that gathers its weights when it runs."""
    with marker.refused() as message:
        found = run_alone(
            marker.call,
            *jax.tree.unflatten(marker.tree, refused_in_forward_mode(message, list(operands))),
            keep=marker.schedule.keep_gathered == "all",
        )
    marker.note(reason=reason)
    return found


def _run(parts: Split, known: dict[Any, Any]) -> None:
    """Evaluates the prologue, the parts as one chain, and the epilogue. Adds what they compute to `known`."""
    _evaluate(parts.prologue, known)
    first, last = (parts.parts[i].call.params["marker"] for i in (0, -1))
    with first.refused() as message:
        shared = refused_in_forward_mode(message, [known[v] for v in parts.shared])
        stages = [_stage(part, parts.shared, known) for part in parts.parts]
        y, outputs = run(stages, [], last.schedule, shared)
    last = parts.parts[-1]
    known.update(zip(last.y, y, strict=True))
    for number, (part, own) in enumerate(zip(parts.parts, outputs, strict=True)):
        known.update(zip((*part.scalars, *part.state), (*own.scalars, *own.state), strict=True))
        note = part.call.params["marker"].note
        note(tied=number > 0, reason="" if number else FIRST)
    _evaluate(parts.epilogue, known)


def _stage(part: Part, shared: tuple[Any, ...], known: Mapping[Any, Any]) -> Any:
    """Returns a part as a stage of a chain."""
    marker = part.call.params["marker"]
    rest = part.call.invars[marker.before :]
    *of_before, of_keys, of_others = marker.tree.children()
    made = iter([_value(v, known) for v in _before(part.call)])
    sent, scaling = (jax.tree.unflatten(tree, [next(made) for _ in range(tree.num_leaves)]) for tree in of_before)
    read = {v for eqn in part.eqns for v in variables(eqn.invars)} | set(variables(rest))
    takes = [i for i, v in enumerate(shared) if v in read]

    def apply(weights: Any, slots: Any, params: Any, x: Any, given: Any, constants: Any, turn: Any) -> Any:
        del turn
        floats, scaling = params
        own = dict(zip((*part.params, *part.constants, *part.x), (*floats, *constants, *x), strict=True))
        own.update((shared[i], given[i]) for i in takes)
        _evaluate(part.eqns, own)
        values = iter([_value(v, own) for v in rest])
        keys, others = (
            jax.tree.unflatten(tree, [next(values) for _ in range(tree.num_leaves)]) for tree in (of_keys, of_others)
        )
        found = marker.call.compute(weights, slots, others, keys, scaling)
        own.update(zip(part.call.outvars, found, strict=True))
        state, scalars = ([own[v] for v in each] for each in (part.state, part.scalars))
        return [own[v] for v in part.y], Outputs(state, scalars)

    with marker.refused() as message:
        floats = [known[v] for v in part.params], scaling
        shards, params = refused_in_forward_mode(message, (sent.shards, floats))
    return stage_of(
        marker.call,
        sent,
        shards=shards,
        params=params,
        constants=[known[v] for v in part.constants],
        takes_shared=bool(takes),
        apply=apply,
        offload=marker.call.remat in OFFLOADED,
        source=marker.source,
    )


def _evaluate(eqns: Sequence[Any], known: dict[Any, Any]) -> None:
    """Evaluates equations, and adds their outputs to `known`."""
    if not eqns:
        return
    outputs = [v for eqn in eqns for v in eqn.outvars]
    made = set(outputs)
    inputs = list(dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars) if v not in made))
    alone = _EMPTY.replace(invars=inputs, outvars=outputs, eqns=list(eqns), effects=_effects(eqns))
    known.update(zip(outputs, eval_jaxpr(alone, [], *(known[v] for v in inputs)), strict=True))


def _effects(eqns: Sequence[Any]) -> set[Any]:
    return set().union(*(eqn.effects for eqn in eqns))


_EMPTY = jax.make_jaxpr(lambda: ())().jaxpr


def _value(v: Any, known: Mapping[Any, Any]) -> Any:
    return v.val if isinstance(v, Literal) else known[v]
