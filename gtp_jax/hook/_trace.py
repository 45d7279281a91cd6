"""Traces one call of a unit to a jaxpr, under the caller's context managers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flax import nnx
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import Jaxpr

from ..chain import is_float
from ..weights import CallKeys, Scaling, Wire
from ._codes import Coded, coded, moving
from ._copies import OnCopies
from ._exchange import Exchange, exchanged, scattered
from ._made import keys_of_call, scaling_of_call, wires_of_call
from ._movement import form_in_use, kept_whole, own_part
from ._nodes import Rebuild, is_array, is_dynamic
from ._path import path_of
from ._placement import Placement
from ._products import Multiply, Views, evaluate, values_of
from ._rows import divisible_examples
from ._scope import within_unit
from ._shards import on_parts


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
        scaling: for each weight, how its products are scaled by amaxes of earlier steps; `None` if they are not.
        wires: the codes that the step has made of the weights. A member of a wire is named `(number,)`, after its
            weight.
    """

    program: Program
    weights: list[Any]
    rest: list[Any]
    names: tuple[str, ...]
    finish: Rebuild
    keys: list[CallKeys | None]
    scaling: list[Scaling | None]
    wires: tuple[Wire, ...]


_CAPTURED = object()  # marks a constant that is traced


def traced(
    method: Callable[..., Any], unit: nnx.Module, args: Any, kwargs: Any, axes: tuple[str, ...], given: Any
) -> Traced:
    """Traces `method(unit, *args, **kwargs)` on copies of the unit and of the nodes among the arguments.

    Args:
        method: the method.
        unit: the unit.
        args: positional arguments.
        kwargs: keyword arguments.
        axes: the axes of the mesh that shard the batch.
        given: the arguments `(args, kwargs)` as the caller has passed them, whose lists and dicts the call may change.

    Raises:
        ValueError: if the call writes a weight that the recipe in scope quantizes, if that recipe asks for something
            that sharded models do not support, or for the same reasons as `placement_of` and `scaling_of_call`.
    """
    call = OnCopies(method, unit, args, kwargs, given)
    arrays = [i for i, value in enumerate(call.values) if is_dynamic(value)]
    at = {i: placement for i in arrays if (placement := moving(call.owners[i])) is not None}
    owners, placements = [call.owners[i] for i in at], tuple(at.values())
    weights = [call.values[i] for i in at]
    formats = tuple(map(coded, owners, placements))
    others = {i: _held(call.values[i], call.owners[i]) for i in arrays if i not in at}
    arguments = [i for i, leaf in enumerate(call.arguments) if is_array(leaf)]
    closed, effects = call.trace(
        dict(zip(at, map(form_in_use, weights, placements), strict=True)) | others,
        arguments,
        lambda *_: within_unit(),
        {id(owner): _metadata_lost(placement) for owner, placement in zip(owners, placements, strict=True)},
    )
    for one in effects.writes:
        weight = next((i for i in one.inputs if i is not None and i < len(formats) and formats[i] is not None), None)
        if weight is not None:
            raise ValueError(written_while_quantized(path_of(owners[weight]), type(unit).__name__))
    captured = [const for const in closed.consts if isinstance(const, Tracer)]
    consts = tuple(_CAPTURED if isinstance(const, Tracer) else const for const in closed.consts)
    examples = divisible_examples((args, kwargs), axes) if placements else 0
    ways = (exchanged, scattered) if examples else (exchanged,)
    each = zip(owners, placements, strict=True)
    sums = tuple(next(filter(None, (way(owner, own, axes) for way in ways)), None) for owner, own in each)
    counts = len(others), len(others) + len(arguments)
    return Traced(
        Program(closed.jaxpr, consts, placements, formats, sums, examples, counts),
        weights,
        [*others.values(), *(call.arguments[i] for i in arguments), *captured],
        tuple(".".join(path_of(owner)) for owner in owners),
        functools.partial(effects.repeat, stored=stored_part),
        [keys_of_call(owner) for owner in owners],
        list(map(scaling_of_call, owners, formats)),
        wires_of_call(owners, formats),
    )


def _metadata_lost(placement: Placement) -> dict[str, None]:
    """Returns the metadata that the copy of a weight's variable lacks. It holds the gathered weight, which has no
    padding. In local view, `refuse_read` recognizes shards by the placement."""
    lost = {"padded": placement.padding.size > 0, "placement": on_parts()}
    return {name: None for name, own in lost.items() if own}


def _held(value: Any, owner: Any) -> Any:
    """Returns an array that is no weight, as the code of a unit sees it: a whole float of an `nnx.Param`, whose
    `out_sharding` names no axis, is kept whole."""
    whole = isinstance(owner, nnx.Param) and is_array(owner.get_raw_value()) and is_float(value)
    return kept_whole(value) if whole and not any(owner.get_metadata().get("out_sharding") or ()) else value


def stored_part(variable: nnx.Variable, value: Any) -> Any:
    """Returns what a rank stores of a value that a call has written."""
    placement = moving(variable)
    return value if placement is None else own_part(value, placement)


def written_while_quantized(path: Sequence[str], owner: str) -> str:
    """Returns the message of the error for code that writes a weight while the recipe in scope quantizes it."""
    name = ".".join(path)
    return (
        f"a call of {owner} writes the weight {name}, which the recipe in scope quantizes: the values of its codes "
        f"could replace the weight. Write the weight outside of the call, or add {name!r} to the recipe's `exclude`."
    )
