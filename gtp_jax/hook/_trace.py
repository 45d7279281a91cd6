"""Traces one call of a unit to a jaxpr, under the caller's context managers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import Jaxpr

from ..chain import is_float
from ..variables import raw_value, split_nodes, with_raw_value
from ..weights import CallKeys, Wire
from ._codes import Coded, coded, moving
from ._containers import containers_of, fill, items_of
from ._exchange import Exchange, exchanged, scattered
from ._made import keys_of_call, wires_of_call
from ._movement import form_in_use, kept_whole, own_part
from ._nodes import Rebuild, is_array, is_dynamic, is_node, taken_apart
from ._path import path_of
from ._placement import Placement
from ._products import Multiply, Views, evaluate, values_of
from ._rows import divisible_examples
from ._scope import within_unit
from ._shards import on_parts
from ._sources import Sources


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
        exchanged: how the gradients that ranks have of each weight are summed by the hook; `None` for a weight whose
            gradient XLA sums.
        examples: the number of examples of the call; 0 if it is unknown (`divisible_examples`).
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
    examples: int
    arguments: tuple[int, int]

    def evaluate(
        self,
        jaxpr: Jaxpr,
        weights: Sequence[Any],
        rest: Sequence[Any],
        views: Views,
        multiply: Multiply | None,
        used: set[int],
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
            used: a set to which the numbers of the weights are added that the jaxpr uses in another way than in
                products that `multiply` computes.
        """
        end, consts = self.arguments[1], self.constants(rest)
        if multiply is None:
            return eval_jaxpr(jaxpr, consts, *weights, *rest[:end])
        found, given = evaluate(jaxpr, consts, (*weights, *rest[:end]), (*views, *[None] * end), multiply, used)
        used.update(view.number for view in given if view is not None)
        return [values_of(one) for one in found]

    def constants(self, rest: Sequence[Any]) -> list[Any]:
        """Returns the constants of the jaxpr, given the other arrays, traced constants included; see `arguments`."""
        captured = iter(rest[self.arguments[1] :])
        return [next(captured) if const is _CAPTURED else const for const in self.consts]


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


def traced(
    original: Callable[..., Any],
    unit: nnx.Module,
    args: Any,
    kwargs: Any,
    axes: tuple[str, ...],
    within: Callable[[Mapping[int, Any], Mapping[int, Any]], contextlib.AbstractContextManager[None]] | None = None,
    *,
    given: Any = None,
) -> Traced:
    """Traces `original(unit, *args, **kwargs)` on copies of the unit and of the nodes among the arguments.

    Args:
        original: the method.
        unit: the unit.
        args: positional arguments.
        kwargs: keyword arguments.
        axes: the axes of the mesh that shard the batch.
        within: for the method of a model, which gathers no weights and is called with shards: a function that returns
            the context for its code, given the originals of the copies and of the traced arrays, by `id`. Only arrays
            that are traced are inputs then.
        given: the arguments `(args, kwargs)` as the caller has passed them, whose lists and dicts the call may change.
            By default, `args` and `kwargs`.

    Raises:
        ValueError: if the call writes a weight that the recipe in scope quantizes, if that recipe asks for something
            that sharded models do not support, or for the same reasons as `placement_of`.
    """
    flat, tree = jax.tree.flatten((args, kwargs), is_leaf=is_node)
    nodes = (unit, *(leaf for leaf in flat if is_node(leaf)))
    template, leaves = split_nodes(nodes)
    values, of_values = jax.tree.flatten(list(map(raw_value, leaves)))
    owners = [leaf for leaf in leaves for _ in jax.tree.leaves(raw_value(leaf))]
    is_input = is_dynamic if within is None else _is_traced
    moves = within is None
    placements = [moving(v) if moves and is_dynamic(value) else None for v, value in zip(owners, values, strict=True)]
    at_weights = [i for i, placement in enumerate(placements) if placement is not None]
    at_others = [i for i, value in enumerate(values) if is_input(value) and placements[i] is None]
    at_arguments = [i for i, leaf in enumerate(flat) if is_array(leaf) and (moves or _is_traced(leaf))]
    # The copies of these variables hold gathered weights, which have no padding, so they lose the entry `padded` of
    # their metadata. In local view, they also lose the entry `placement`, by which `refuse_read` recognizes shards.
    padded = {id(owners[i]) for i in at_weights if (own := placements[i]) is not None and own.padding.size}
    whole = {id(owners[i]) for i in at_weights} if on_parts() else set[int]()
    originals, containers = _graph_of(nodes), containers_of((args, kwargs) if given is None else given)
    finish: list[Callable[[Collection[int], Sequence[Any]], Any]] = []
    set_anew: list[_SetAnew] = []
    known = tuple(placement for placement in placements if placement is not None)
    formats = tuple(coded(owners[i], placement) for i, placement in zip(at_weights, known, strict=True))

    def function(weights: list[Any], others: list[Any], arguments: list[Any]) -> list[Any]:
        put = list(values)
        for i, value in zip((*at_weights, *at_others), (*weights, *others), strict=True):
            put[i] = value
        each = zip(leaves, jax.tree.unflatten(of_values, put), strict=True)
        lost = {"padded": padded, "placement": whole}
        copies = [
            with_raw_value(leaf, v, **{name: None for name in lost if id(leaf) in lost[name]}) for leaf, v in each
        ]
        merged = template.merged(copies)
        filled, own = list(flat), iter(merged[1:])
        for i, value in zip(at_arguments, arguments, strict=True):
            filled[i] = value
        args, kwargs = jax.tree.unflatten(tree, [next(own) if is_node(leaf) else leaf for leaf in filled])
        held = containers_of((args, kwargs))
        contents = [list(items_of(one)) for one in held]
        before = _Before(originals, _graph_of(merged))
        given_as = {id(new): values[i] for i, new in zip(at_others, others, strict=True)}
        with within_unit() if within is None else within(before.known, given_as):
            result = original(merged[0], *args, **kwargs)
        attributes = before.attributes()  # taken apart with the result, because both may contain one new node
        pairs = zip(held, contents, strict=True)
        changed = [i for i, (one, had) in enumerate(pairs) if not _is_same(had, list(items_of(one)))]
        written_to = [value for _, _, value in attributes], [held[i] for i in changed]
        arrays, rebuild = before.taken_apart((result, *written_to))
        bare = [(owner, name, value is _DELETED) for owner, name, value in attributes]
        refill = functools.partial(_refilled, changed, containers)
        inputs = {id(a): i for i, a in enumerate((*weights, *others, *arguments))}
        written, write, found = before.writes(inputs, gathered=moves)
        set_anew[:] = [dataclasses.replace(one, start=len(arrays) + one.start) for one in found]
        finish.append(functools.partial(_finish, rebuild, bare, refill, write, len(arrays)))
        return [*arrays, *written]

    weights = [values[i] for i in at_weights]
    others = [kept_whole(values[i]) if moves and _is_whole(owners[i]) else values[i] for i in at_others]
    arguments = [flat[i] for i in at_arguments]
    gathered = [form_in_use(shard, placement) for shard, placement in zip(weights, known, strict=True)]
    closed = jax.make_jaxpr(function)(gathered, others, arguments)
    sources = Sources(closed.jaxpr)
    unwritten = frozenset(one.variable for one in set_anew if one.is_unwritten(sources))
    for one in set_anew:
        weight = next((i for i in one.inputs if i is not None and i < len(formats) and formats[i] is not None), None)
        if weight is not None and one.variable not in unwritten:
            raise ValueError(written_while_quantized(path_of(owners[at_weights[weight]]), type(unit).__name__))
    captured = [const for const in closed.consts if isinstance(const, Tracer)]
    consts = tuple(_CAPTURED if isinstance(const, Tracer) else const for const in closed.consts)
    examples = divisible_examples((args, kwargs), axes) if known else 0
    ways = (exchanged, scattered) if examples else (exchanged,)
    each = zip(at_weights, known, strict=True)
    sums = tuple(next(filter(None, (way(owners[i], own, axes) for way in ways)), None) for i, own in each)
    counts = len(others), len(others) + len(arguments)
    program = Program(closed.jaxpr, consts, known, formats, sums, examples, counts)
    names = tuple(".".join(path_of(owners[i])) for i in at_weights)
    keys = [keys_of_call(owners[i]) for i in at_weights]
    wires = wires_of_call([owners[i] for i in at_weights], formats)
    done = functools.partial(finish[-1], unwritten)
    return Traced(program, weights, [*others, *arguments, *captured], names, done, keys, wires)


def _finish(
    rebuild: Rebuild,
    attributes: Sequence[tuple[Any, str, bool]],
    refill: Callable[[Sequence[Any]], None],
    write: _Repeat,
    results: int,
    unwritten: Collection[int],
    found: Sequence[Any],
) -> Any:
    write(found[results:], unwritten)
    result, values, contents = rebuild(found[:results])
    refill(contents)
    for (owner, name, deleted), value in zip(attributes, values, strict=True):
        if deleted:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    return result


def _is_same(had: list[Any], has: list[Any]) -> bool:
    return len(had) == len(has) and all(a is b for a, b in zip(had, has, strict=True))


def _refilled(changed: Sequence[int], containers: Sequence[Any], contents: Sequence[Any]) -> None:
    """Gives the lists and dicts with these numbers new contents."""
    for i, new in zip(changed, contents, strict=True):
        fill(containers[i], new)


def _is_traced(value: Any) -> bool:
    return isinstance(value, Tracer)


_DELETED = object()  # the value that represents an attribute which a call has deleted


def _is_whole(owner: Any) -> bool:
    """Returns whether a leaf is an `nnx.Param` that holds a JAX array of an inexact dtype, and whose `out_sharding`
    names no axis."""
    value = owner.get_raw_value() if isinstance(owner, nnx.Param) else None
    return is_array(value) and is_float(value) and not any(owner.get_metadata().get("out_sharding") or ())


def _graph_of(nodes: tuple[Any, ...]) -> list[Any]:
    """Returns the given nodes and the nodes within them, each once. Copies have the same order as their originals."""
    return [node for _, node in nnx.iter_graph(nodes) if is_node(node)]


# A function of the arrays that a call has written, which repeats the writes on the originals, except on the variables
# with the given `id`s.
_Repeat = Callable[[Sequence[Any], Collection[int]], None]


@dataclasses.dataclass(frozen=True)
class _SetAnew:
    """A variable that holds another value after a call than before it.

    Attributes:
        variable: the `id` of the original.
        start: the index of the value's first array among the outputs of the jaxpr.
        inputs: for each leaf of the value before the call, the index of the jaxpr's input; `None` if it was none.
        count: the number of arrays in the value now.
        same_form: whether the value has the structure that it had, and consists of arrays.
    """

    variable: int
    start: int
    inputs: tuple[int | None, ...]
    count: int
    same_form: bool

    def is_unwritten(self, sources: Sources) -> bool:
        """Returns whether the value consists of the same arrays as before, as after `nnx.remat`."""
        outputs = range(self.start, self.start + self.count)
        return self.same_form and None not in self.inputs and self.inputs == tuple(map(sources.input_of, outputs))


class _Before:
    """Records the state of copies before a call is traced on them, to find afterwards what the call has written.

    Args:
        originals: the nodes and variables that were copied.
        copies: their copies, in the same order.

    Attributes:
        known: the originals, by the `id`s of their copies.
    """

    def __init__(self, originals: list[Any], copies: list[Any]) -> None:
        self._pairs = list(zip(originals, copies, strict=True))
        self.known = {id(copy): original for original, copy in self._pairs}
        self._attributes = {id(copy): dict(vars(copy)) for copy in copies if not isinstance(copy, nnx.Variable)}
        values = {id(copy): copy.get_raw_value() for copy in copies if isinstance(copy, nnx.Variable)}
        self._values = {name: (value, *jax.tree.flatten(value)) for name, value in values.items()}

    def taken_apart(self, value: Any) -> tuple[list[Any], Rebuild]:
        """Returns the JAX arrays within a value, and a function that rebuilds the value from other arrays.

        If the value is a copy, or a pytree that contains copies, their arrays are left out, and the rebuilt value
        contains the originals instead. Copies within a module or other `nnx.Pytree` that is not a copy itself are
        rebuilt like the rest of it.
        """
        return taken_apart(value, self.known)

    def attributes(self) -> list[tuple[Any, str, Any]]:
        """Returns the attributes that the call has set to another value or deleted: the original node, the name, and
        the value, or `_DELETED`. A value that the call has changed in place does not count."""
        found = []
        for original, copy in self._pairs:
            if isinstance(copy, nnx.Variable):
                continue
            before, now = self._attributes[id(copy)], vars(copy)
            for name in (name for name in now if not name.startswith("_pytree__")):
                if name not in before or _differs(now[name], before[name]):
                    found.append((original, name, now[name]))
            found += [(original, name, _DELETED) for name in before if name not in now]
        return found

    def writes(self, inputs: Mapping[int, int], *, gathered: bool) -> tuple[list[Any], _Repeat, list[_SetAnew]]:
        """Finds the variables that the call has set to another value, or whose list or dict it has changed in place.

        Args:
            inputs: the indices of the jaxpr's inputs, by the `id`s of the arrays.
            gathered: whether the copies of sharded weights hold gathered weights, of which each rank keeps its part.

        Returns:
            The JAX arrays that the call has written; a function that repeats the writes on the originals; and the
            variables.
        """
        arrays: list[Any] = []
        set_anew: list[_SetAnew] = []
        rebuilds: list[tuple[Any, int, Rebuild]] = []  # (original, count of arrays, its value)
        for original, copy in self._pairs:
            if not isinstance(copy, nnx.Variable):
                continue
            value, (was, had, form) = copy.get_raw_value(), self._values[id(copy)]
            leaves, structure = jax.tree.flatten(value)
            if value is not was or structure != form or not _is_same(had, leaves):
                own, rebuild = self.taken_apart(value)
                before = tuple(inputs.get(id(leaf)) for leaf in had)
                same = len(own) == len(leaves) and structure == form
                set_anew.append(_SetAnew(id(original), len(arrays), before, len(own), same))
                rebuilds.append((original, len(own), rebuild))
                arrays += own

        def write_all(found: Sequence[Any], unwritten: Collection[int]) -> None:
            start = 0
            for original, count, rebuild in rebuilds:
                if id(original) not in unwritten:
                    value = rebuild(found[start : start + count])
                    placement = moving(original) if gathered else None
                    original.set_raw_value(value if placement is None else own_part(value, placement))
                start += count

        return arrays, write_all, set_anew


def written_while_quantized(path: Sequence[str], owner: str) -> str:
    """Returns the message of the error for code that writes a weight while the recipe in scope quantizes it."""
    name = ".".join(path)
    return (
        f"a call of {owner} writes the weight {name}, which the recipe in scope quantizes: the values of its codes "
        f"could replace the weight. Write the weight outside of the call, or add {name!r} to the recipe's `exclude`."
    )


def _differs(now: Any, before: Any) -> bool:
    if now is before:
        return False
    if is_node(now) or is_node(before) or is_array(now) or is_array(before):
        return True
    try:
        return type(now) is not type(before) or bool(now != before)
    except ValueError:  # NumPy arrays
        return True
