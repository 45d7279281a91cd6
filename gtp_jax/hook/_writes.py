"""Finds what a call that is traced on copies of nodes has written to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from ..variables import is_same, is_variable
from ._nodes import Rebuild, is_array, is_node, taken_apart
from ._sources import Sources


class Attribute(NamedTuple):
    """An attribute that a call has set to another value, or deleted.

    Attributes:
        owner: the original node.
        name: the name of the attribute.
        deleted: whether the call has deleted it.
    """

    owner: Any
    name: str
    deleted: bool


@dataclasses.dataclass(frozen=True)
class Write:
    """A variable that holds another value after a call than before it.

    Attributes:
        variable: the original.
        inputs: for each leaf of the value before the call, the index of the jaxpr's input; `None` if it was none.
        outputs: the indices of the value's arrays among the outputs of the jaxpr.
        same_form: whether the value has the structure that it had, and consists of arrays.
        rebuild: a function from these arrays to the value.
    """

    variable: nnx.Variable
    inputs: tuple[int | None, ...]
    outputs: range
    same_form: bool
    rebuild: Rebuild

    def changes(self, sources: Sources) -> bool:
        """Returns whether the value consists of other arrays than before. After `nnx.remat`, it does not."""
        same = self.same_form and None not in self.inputs
        return not same or self.inputs != tuple(map(sources.input_of, self.outputs))


class Before:
    """Records the state of copies before a call is traced on them, to find afterwards what the call has written.

    Args:
        originals: the nodes and variables that were copied.
        copies: their copies, in the same order.

    Attributes:
        known: the originals, by the `id`s of their copies.
    """

    def __init__(self, originals: Sequence[Any], copies: Sequence[Any]) -> None:
        pairs = list(zip(originals, copies, strict=True))
        self.known = {id(copy): original for original, copy in pairs}
        self._nodes = [(original, copy, dict(vars(copy))) for original, copy in pairs if not is_variable(copy)]
        of_variables = [(original, copy, copy.get_raw_value()) for original, copy in pairs if is_variable(copy)]
        self._variables = [(*one, *jax.tree.flatten(one[-1])) for one in of_variables]

    def taken_apart(self, value: Any) -> tuple[list[Any], Rebuild]:
        """Returns the JAX arrays within a value, and a function that rebuilds the value from other arrays.

        If the value is a copy, or a pytree that contains copies, their arrays are left out, and the rebuilt value
        contains the originals instead. Copies within a module or other `nnx.Pytree` that is not a copy itself are
        rebuilt like the rest of it.
        """
        return taken_apart(value, self.known)

    def attributes(self) -> tuple[list[Attribute], list[Any]]:
        """Returns the attributes that the call has set to another value or deleted, and their values; `None` for those
        that are deleted. A value that the call has changed in place does not count."""
        found = []
        for original, copy, before in self._nodes:
            now = vars(copy)
            for name in (name for name in now if not name.startswith("_pytree__")):
                if name not in before or _differs(now[name], before[name]):
                    found.append((Attribute(original, name, deleted=False), now[name]))
            found += [(Attribute(original, name, deleted=True), None) for name in before if name not in now]
        return [one for one, _ in found], [value for _, value in found]

    def writes(self, inputs: Mapping[int, int], start: int) -> tuple[list[Write], list[Any]]:
        """Returns the variables that the call has set to another value, or whose list or dict it has changed in place,
        and the JAX arrays in their values.

        Args:
            inputs: the indices of the jaxpr's inputs, by the `id`s of the arrays.
            start: the index of the first of these arrays among the outputs of the jaxpr.
        """
        arrays: list[Any] = []
        writes: list[Write] = []
        for original, copy, was, had, form in self._variables:
            value = copy.get_raw_value()
            leaves, structure = jax.tree.flatten(value)
            if value is was and structure == form and is_same(had, leaves):
                continue
            own, rebuild = self.taken_apart(value)
            outputs = range(start + len(arrays), start + len(arrays) + len(own))
            same_form = len(own) == len(leaves) and structure == form
            writes.append(Write(original, tuple(inputs.get(id(leaf)) for leaf in had), outputs, same_form, rebuild))
            arrays += own
        return writes, arrays


def _differs(now: Any, before: Any) -> bool:
    if now is before:
        return False
    if is_node(now) or is_node(before) or is_array(now) or is_array(before):
        return True
    try:
        return type(now) is not type(before) or bool(now != before)
    except ValueError:  # NumPy arrays
        return True
