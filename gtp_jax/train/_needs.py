"""Finds the inputs of a jaxpr on which some of its outputs depend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import core

from ..hook import is_reference, scan_counts
from ._terms import CALLS, called_jaxpr

Tree = Any

# The name (`jax.ad_checkpoint.checkpoint_name`) of a count that `as_count` declares.
DECLARED = "gtp_jax_count"

_CALLS = frozenset((*CALLS, "shard_map", "custom_vjp_call_jaxpr", "custom_lin"))
# Operations on several arrays at once, whose outputs each depend on the input in the same place.
BY_PLACE = frozenset(("optimization_barrier", "psum", "psum2", "psum_invariant", "pmax", "pmin", "pvary"))


class Needs(NamedTuple):
    """What outputs of a jaxpr depend on.

    Attributes:
        inputs: the numbers of the inputs.
        constants: the arrays that the jaxpr closes over, by `id`.
    """

    inputs: frozenset[int]
    constants: Mapping[int, Any]


def needs_of(closed: Any, outputs: Iterable[int], kept: Mapping[int, int]) -> Needs:
    """Returns the inputs and constants on which some outputs depend, in whatever way: also through integers, through
    comparisons, through the predicate of a branch, and where a gradient is stopped.

    An output of an operation that is not known here depends on all of its operands; a declared count, on nothing.

    Args:
        closed: the closed jaxpr.
        outputs: the numbers of the outputs.
        kept: for each input that holds an output of an earlier run, the number of that output.
    """
    reader, wanted = _Reader(), frozenset(outputs)
    while True:
        inputs = reader.inputs(closed, wanted)
        more = wanted | {kept[number] for number in inputs if number in kept}
        if more == wanted:
            return Needs(inputs, reader.constants)
        wanted = more


def numbered(tree: Tree) -> Tree:
    """Returns a pytree with the number of each leaf in its place, as `jax.make_jaxpr` numbers inputs and outputs."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, range(len(leaves)))


class _Reader:
    """Reads jaxprs backward.

    Attributes:
        constants: the constants found so far, by `id`.
    """

    def __init__(self) -> None:
        self.constants: dict[int, Any] = {}

    def inputs(self, closed: Any, outputs: Iterable[int]) -> frozenset[int]:
        """Returns the numbers of the inputs on which outputs of a jaxpr, closed or not, depend."""
        jaxpr = getattr(closed, "jaxpr", closed)
        wanted = {jaxpr.outvars[number] for number in outputs if isinstance(jaxpr.outvars[number], core.Var)}
        for eqn in reversed(jaxpr.eqns):
            if any(v in wanted for v in eqn.invars if is_reference(v)):  # it may write what is read later
                wanted.update(v for v in eqn.invars if isinstance(v, core.Var))
            elif found := [number for number, v in enumerate(eqn.outvars) if v in wanted]:
                operands = [eqn.invars[number] for number in self._operands(eqn, found)]
                wanted.update(v for v in operands if isinstance(v, core.Var))
        for v, value in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=False):
            if v in wanted:
                self.constants[id(value)] = value
        return frozenset(number for number, v in enumerate(jaxpr.invars) if v in wanted)

    def _operands(self, eqn: core.JaxprEqn, outputs: list[int]) -> Iterable[int]:
        """Returns the numbers of an operation's operands on which some of its outputs depend."""
        name, params = eqn.primitive.name, eqn.params
        if name == "name" and params["name"] == DECLARED:
            return ()
        if name in BY_PLACE and len(eqn.invars) == len(eqn.outvars):
            return outputs
        if name == "cond":
            branches = (self.inputs(branch, outputs) for branch in params["branches"])
            return {0, *(1 + number for numbers in branches for number in numbers)}
        if name == "scan":
            return self._in_loop(params["jaxpr"], outputs, *scan_counts(params))
        if name == "while":
            return self._in_while(params, outputs)
        inner = inner_jaxpr(eqn)
        return range(len(eqn.invars)) if inner is None else self.inputs(inner, outputs)

    def _in_loop(self, body: Any, outputs: Iterable[int], consts: int, carries: int) -> frozenset[int]:
        """Returns the numbers of the inputs of a loop's body on which its outputs depend after any number of rounds."""
        wanted = frozenset(outputs)
        while True:
            inputs = self.inputs(body, wanted)
            more = wanted | {number - consts for number in inputs if consts <= number < consts + carries}
            if more == wanted:
                return inputs | {consts + number for number in wanted if number < carries}
            wanted = more

    def _in_while(self, params: Mapping[str, Any], outputs: Iterable[int]) -> set[int]:
        ahead, consts = params["cond_nconsts"], params["body_nconsts"]
        carries = len(params["body_jaxpr"].jaxpr.outvars)
        deciding = self.inputs(params["cond_jaxpr"], (0,))  # the number of rounds decides about every output
        wanted = {*outputs, *(number - ahead for number in deciding if number >= ahead)}
        within = self._in_loop(params["body_jaxpr"], wanted, consts, carries)
        return {number for number in deciding if number < ahead} | {ahead + number for number in within}


def inner_jaxpr(eqn: core.JaxprEqn) -> Any:
    """Returns the jaxpr, closed or not, that an operation calls once with its operands; `None` for other operations."""
    inner = called_jaxpr(eqn)
    fits = inner is not None and len(getattr(inner, "jaxpr", inner).invars) == len(eqn.invars)
    return inner if fits and eqn.primitive.name in _CALLS else None
