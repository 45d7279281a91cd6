"""Traces one call of a unit to a jaxpr, under the caller's context managers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import Jaxpr

from ..weights import CallKeys, Wire
from ._codes import Coded, coded, moving
from ._exchange import Exchange, exchanged
from ._jaxprs import CALLS
from ._made import keys_of_call, wires_of_call
from ._movement import form_in_use, kept_whole, own_part
from ._nodes import Rebuild, is_array, is_dynamic, is_node, taken_apart, value_of, variables_of, with_value
from ._path import path_of
from ._placement import Placement
from ._products import Multiply, Views, evaluate, values_of
from ._scope import within_unit
from ._shards import on_parts
from ._ties import is_float


@dataclasses.dataclass(frozen=True)
class Program:
    """The computation of a call of a unit. It contains no traced arrays, because functions that outlive the trace refer
    to it.

    Attributes:
        jaxpr: the jaxpr of the call. Its inputs are the weights, then the other arrays up to the end of `arguments`.
        consts: the constants of the jaxpr, with `_CAPTURED` instead of each traced one.
        placements: the placements of the weights.
        coded: how each weight is quantized for its gather; `None` for a weight that the recipe in scope does not
            quantize.
        exchanged: how each weight's gradient is exchanged; `None` for a weight whose gradient is not exchanged.
        arguments: the start and end of the call's arguments among the other arrays (`Traced.rest`). Before the
            arguments come the other arrays of the unit and of the nodes among the arguments: the values of variables
            that are neither gathered nor quantized, and arrays that are attributes. After them come the traced
            constants, which are not inputs of the jaxpr.
    """

    jaxpr: Jaxpr
    consts: tuple[Any, ...]
    placements: tuple[Placement, ...]
    coded: tuple[Coded | None, ...]
    exchanged: tuple[Exchange | None, ...]
    arguments: tuple[int, int]

    def evaluate(
        self, jaxpr: Jaxpr, weights: Sequence[Any], rest: Sequence[Any], views: Views, multiply: Multiply | None
    ) -> list[Any]:
        """Evaluates `jaxpr`, which has the same constants as the program's own jaxpr, and returns its outputs.

        Args:
            jaxpr: the jaxpr. Its inputs are what is computed from weights alone, then the other arrays up to the end of
                `arguments`.
            weights: what is computed from weights alone.
            rest: the other arrays, traced constants included; see `arguments`.
            views: for each of `weights`, how it is a view of a weight; `None` if it is not.
            multiply: the function that computes products with weights. `None` computes them as the jaxpr does, and is
                allowed only if no weight has a slot.
        """
        end = self.arguments[1]
        captured = iter(rest[end:])
        consts = [next(captured) if const is _CAPTURED else const for const in self.consts]
        if multiply is None:
            return eval_jaxpr(jaxpr, consts, *weights, *rest[:end])
        found, _ = evaluate(jaxpr, consts, (*weights, *rest[:end]), (*views, *[None] * end), multiply)
        return [values_of(one) for one in found]


class Traced(NamedTuple):
    """A traced call of a unit.

    Attributes:
        program: the computation of the call.
        weights: the shards of the weights that are gathered or quantized.
        rest: the other arrays; see `Program.arguments`.
        names: the path of each weight in the model that was sharded.
        finish: a function of the program's outputs. It writes to variables and attributes what the unit's code wrote,
            and returns the result of the call.
        keys: for each weight, the keys of stochastic rounding of this call; `None` for weights without any.
        wires: the codes that the step has made of the weights. A member of a wire is named `(number,)`, after its
            weight.
    """

    program: Program
    weights: list[Any]
    rest: list[Any]
    names: tuple[str, ...]
    finish: Rebuild
    keys: list[CallKeys | None]
    wires: tuple[Wire, ...]


_CAPTURED = object()  # marks a constant that is traced


def traced(original: Callable[..., Any], unit: nnx.Module, args: Any, kwargs: Any, axes: tuple[str, ...]) -> Traced:
    """Traces `original(unit, *args, **kwargs)` on copies of the unit and of the nodes among the arguments.

    Args:
        original: the method.
        unit: the unit.
        args: positional arguments.
        kwargs: keyword arguments.
        axes: the axes of the mesh that shard the batch.

    Raises:
        ValueError: if the call writes a weight that the recipe in scope quantizes, if that recipe asks for something
            that sharded models do not support, or for the same reasons as `placement_of`.
    """
    flat, tree = jax.tree.flatten((args, kwargs), is_leaf=is_node)
    nodes = (unit, *(leaf for leaf in flat if is_node(leaf)))
    graph, state = nnx.split(nodes)
    leaves, structure = variables_of(state)
    values, of_values = jax.tree.flatten([value_of(leaf) for leaf in leaves])
    owners = [leaf for leaf in leaves for _ in jax.tree.leaves(value_of(leaf))]
    placements = [moving(owner) if is_dynamic(value) else None for owner, value in zip(owners, values, strict=True)]
    at_weights = [i for i, placement in enumerate(placements) if placement is not None]
    at_others = [i for i, value in enumerate(values) if is_dynamic(value) and placements[i] is None]
    at_arguments = [i for i, leaf in enumerate(flat) if is_array(leaf)]
    # The copies of these variables hold gathered weights, which have no padding, so they lose the entry `padded` of
    # their metadata. In local view, they also lose the entry `placement`, by which `refuse_read` recognizes shards.
    padded = {id(owners[i]) for i in at_weights if (own := placements[i]) is not None and own.padding.size}
    whole = {id(owners[i]) for i in at_weights} if on_parts() else set[int]()
    originals = _graph_of(nodes)
    finish: list[Rebuild] = []
    unwritten: list[tuple[int | None, int]] = []  # (output's index, weight's number) per rewritten quantized weight
    known = tuple(placement for placement in placements if placement is not None)
    formats = tuple(coded(owners[i], placement) for i, placement in zip(at_weights, known, strict=True))

    def function(weights: list[Any], others: list[Any], arguments: list[Any]) -> list[Any]:
        put = list(values)
        for i, value in zip((*at_weights, *at_others), (*weights, *others), strict=True):
            put[i] = value
        each = zip(leaves, jax.tree.unflatten(of_values, put), strict=True)
        lost = {"padded": padded, "placement": whole}
        copies = [with_value(leaf, v, **{name: None for name in lost if id(leaf) in lost[name]}) for leaf, v in each]
        merged = nnx.merge(graph, jax.tree.unflatten(structure, copies))
        given, own = list(flat), iter(merged[1:])
        for i, value in zip(at_arguments, arguments, strict=True):
            given[i] = value
        given = [next(own) if is_node(leaf) else leaf for leaf in given]
        args, kwargs = jax.tree.unflatten(tree, given)
        before = _Before(originals, _graph_of(merged))
        with within_unit():
            result = original(merged[0], *args, **kwargs)
        arrays, rebuild = before.taken_apart(result)
        quantized = {id(weights[i]): i for i, form in enumerate(formats) if form is not None}
        written, write, rewritten = before.writes(quantized)
        unwritten.extend((None if place is None else len(arrays) + place, i) for place, i in rewritten)
        finish.append(functools.partial(_finish, rebuild, write, len(arrays)))
        return [*arrays, *written]

    weights = [values[i] for i in at_weights]
    others = [kept_whole(values[i]) if _is_whole(owners[i]) else values[i] for i in at_others]
    arguments = [flat[i] for i in at_arguments]
    gathered = [form_in_use(shard, placement) for shard, placement in zip(weights, known, strict=True)]
    closed = jax.make_jaxpr(function)(gathered, others, arguments)
    for place, i in unwritten:
        if place is None or origin(closed.jaxpr, closed.jaxpr.outvars[place]) is not closed.jaxpr.invars[i]:
            raise ValueError(written_while_quantized(path_of(owners[at_weights[i]]), type(unit).__name__))
    captured = [const for const in closed.consts if isinstance(const, Tracer)]
    consts = tuple(_CAPTURED if isinstance(const, Tracer) else const for const in closed.consts)
    sums = tuple(exchanged(owners[i], placement, axes) for i, placement in zip(at_weights, known, strict=True))
    program = Program(closed.jaxpr, consts, known, formats, sums, (len(others), len(others) + len(arguments)))
    names = tuple(".".join(path_of(owners[i])) for i in at_weights)
    keys = [keys_of_call(owners[i]) for i in at_weights]
    wires = wires_of_call([owners[i] for i in at_weights], formats)
    return Traced(program, weights, [*others, *arguments, *captured], names, finish[-1], keys, wires)


def _finish(rebuild: Rebuild, write: Rebuild, results: int, found: Sequence[Any]) -> Any:
    write(found[results:])
    return rebuild(found[:results])


def _is_whole(owner: Any) -> bool:
    """Returns whether a leaf is an `nnx.Param` that holds a JAX array of an inexact dtype, and whose `out_sharding`
    names no axis."""
    value = owner.get_raw_value() if isinstance(owner, nnx.Param) else None
    return is_array(value) and is_float(value) and not any(owner.get_metadata().get("out_sharding") or ())


def _graph_of(nodes: tuple[Any, ...]) -> list[Any]:
    """Returns the given nodes and the nodes within them, each once. Copies have the same order as their originals."""
    return [node for _, node in nnx.iter_graph(nodes) if is_node(node)]


class _Before:
    """Records the state of copies before a call is traced on them, to find afterwards what the call has written.

    Args:
        originals: the nodes and variables that were copied.
        copies: their copies, in the same order.
    """

    def __init__(self, originals: list[Any], copies: list[Any]) -> None:
        self._pairs = list(zip(originals, copies, strict=True))
        self._known = {id(copy): original for original, copy in self._pairs}
        self._attributes = {id(copy): dict(vars(copy)) for copy in copies if not isinstance(copy, nnx.Variable)}
        self._values = {id(copy): copy.get_raw_value() for copy in copies if isinstance(copy, nnx.Variable)}

    def taken_apart(self, value: Any) -> tuple[list[Any], Rebuild]:
        """Returns the JAX arrays within a value, and a function that rebuilds the value from other arrays.

        If the value is a copy, or a pytree that contains copies, their arrays are left out, and the rebuilt value
        contains the originals instead. Copies within a module or other `nnx.Pytree` that is not a copy itself are
        rebuilt like the rest of it.
        """
        return taken_apart(value, self._known)

    def writes(self, quantized: Mapping[int, int]) -> tuple[list[Any], Rebuild, list[tuple[int | None, int]]]:
        """Finds the variables and attributes that the call has set to another value or deleted. A value that the call
        has changed in place does not count.

        Args:
            quantized: the numbers of quantized weights, by the `id`s of their arrays before the call.

        Returns:
            First, the JAX arrays that the call has written. Second, a function that takes such arrays and repeats the
            writes on the originals, except for the variables of quantized weights. Third, a pair `(index, number)` for
            each quantized weight whose variable the call has written: the index of the written array among the arrays
            (`None` if the written value is not a JAX array), and the number of the weight.
        """
        arrays: list[Any] = []
        rewritten: list[tuple[int | None, int]] = []
        put: list[tuple[int, Rebuild]] = []

        def write(value: Any, setter: Callable[[Any], Any]) -> None:
            own, rebuild = self.taken_apart(value)
            arrays.extend(own)
            put.append((len(own), lambda found: setter(rebuild(found))))

        for original, copy in self._pairs:
            if isinstance(copy, nnx.Variable):
                value, was = copy.get_raw_value(), self._values[id(copy)]
                if value is not was and id(was) in quantized:  # the values of codes must not replace the stored weight
                    rewritten.append((len(arrays) if is_array(value) else None, quantized[id(was)]))
                    write(value, lambda _: None)
                elif value is not was:
                    write(value, lambda value, node=original: _write(node, value))
                continue
            before, now = self._attributes[id(copy)], vars(copy)
            for name in (name for name in now if not name.startswith("_pytree__")):
                if name not in before or _differs(now[name], before[name]):
                    write(now[name], lambda value, node=original, name=name: setattr(node, name, value))
            for name in (name for name in before if name not in now):
                put.append((0, lambda _, node=original, name=name: delattr(node, name)))

        def write_all(found: Sequence[Any]) -> None:
            start = 0
            for count, one in put:
                one(found[start : start + count])
                start += count

        return arrays, write_all, rewritten


def origin(jaxpr: Jaxpr, variable: Any) -> Any:
    """Traces a variable of a jaxpr back, through calls (`CALLS`) that return it unchanged, to an input of the jaxpr.
    Returns that input; `None` if the variable has another origin.

    The origin tells whether code has written an `nnx.Variable`: `nnx.jit` and `nnx.remat` put a new array into every
    variable that they are given, even if the code within them does not write it.
    """
    if variable in jaxpr.invars:
        return variable
    for eqn in jaxpr.eqns:
        if variable not in eqn.outvars:
            continue
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        inner = getattr(inner, "jaxpr", inner)
        if eqn.primitive.name not in CALLS or inner is None or len(inner.invars) != len(eqn.invars):
            return None
        within = origin(inner, inner.outvars[eqn.outvars.index(variable)])
        return None if within is None else origin(jaxpr, eqn.invars[inner.invars.index(within)])
    return None


def written_while_quantized(path: Sequence[str], owner: str) -> str:
    """Returns the message of the error for code that writes a weight while the recipe in scope quantizes it."""
    name = ".".join(path)
    return (
        f"a call of {owner} writes the weight {name}, which the recipe in scope quantizes: the values of its codes "
        f"could replace the weight. Write the weight outside of the call, or add {name!r} to the recipe's `exclude`."
    )


def _write(variable: nnx.Variable, value: Any) -> None:
    placement = moving(variable)
    variable.set_raw_value(value if placement is None else own_part(value, placement))


def _differs(now: Any, before: Any) -> bool:
    if now is before:
        return False
    if is_node(now) or is_node(before) or is_array(now) or is_array(before):
        return True
    try:
        return type(now) is not type(before) or bool(now != before)
    except ValueError:  # NumPy arrays
        return True
