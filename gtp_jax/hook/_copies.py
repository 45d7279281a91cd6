"""Traces a method to a jaxpr, on copies of the nodes that it is called with, and repeats on the originals what it has
written."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from ..variables import is_same, raw_value, split_nodes, with_raw_value
from ._containers import containers_of, fill, items_of
from ._nodes import Rebuild, is_node
from ._sources import Sources
from ._writes import Attribute, Before, Write


@dataclasses.dataclass(frozen=True)
class Effects:
    """Holds what a method returns and writes.

    Attributes:
        rebuild: a function from the jaxpr's first outputs to the result, the values of `attributes`, and the contents
            of `containers`.
        results: the number of these outputs.
        attributes: the attributes that are written.
        containers: the lists and dicts among the arguments that are changed in place.
        writes: the variables that are written.
    """

    rebuild: Rebuild
    results: int
    attributes: Sequence[Attribute]
    containers: Sequence[Any]
    writes: Sequence[Write]

    def repeat(self, found: Sequence[Any], stored: Callable[[nnx.Variable, Any], Any]) -> Any:
        """Writes to the originals what the method has written to their copies, and returns its result.

        Args:
            found: the outputs of the jaxpr.
            stored: a function from an original and the value of its copy to the value that the original receives.
        """
        for one in self.writes:
            value = one.rebuild(found[one.outputs.start : one.outputs.stop])
            one.variable.set_raw_value(stored(one.variable, value))
        result, values, contents = self.rebuild(found[: self.results])
        for container, own in zip(self.containers, contents, strict=True):
            fill(container, own)
        for one, value in zip(self.attributes, values, strict=True):
            if one.deleted:
                delattr(one.owner, one.name)
            else:
                setattr(one.owner, one.name, value)
        return result


class OnCopies:
    """A call of a method on copies of a module and of the nodes among its arguments.

    Args:
        method: the method.
        module: the module.
        args: positional arguments.
        kwargs: keyword arguments.
        given: the arguments `(args, kwargs)` as the caller has passed them, whose lists and dicts the call may change.

    Attributes:
        values: the leaves of the values of the nodes' variables, and the arrays that are attributes of nodes.
        owners: for each of them, the variable, or the array itself.
        arguments: the leaves of the arguments, which may be nodes.
    """

    def __init__(self, method: Callable[..., Any], module: nnx.Module, args: Any, kwargs: Any, given: Any) -> None:
        self.arguments, self._tree = jax.tree.flatten((args, kwargs), is_leaf=is_node)
        self._method, self._given = method, given
        self._nodes = (module, *filter(is_node, self.arguments))
        self._template, self._leaves = split_nodes(self._nodes)
        self.values, self._of_values = jax.tree.flatten(list(map(raw_value, self._leaves)))
        self.owners = [leaf for leaf in self._leaves for _ in jax.tree.leaves(raw_value(leaf))]

    def trace(
        self,
        inputs: Mapping[int, Any],
        arguments: Sequence[int],
        within: Callable[[Mapping[int, Any], Mapping[int, Any]], contextlib.AbstractContextManager[None]],
        metadata: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> tuple[Any, Effects]:
        """Traces the call.

        Args:
            inputs: by index among `values`, what the method sees in their place, in the order of the jaxpr's inputs.
            arguments: the indices of the `arguments` that are further inputs.
            within: a function that returns the context in which the method is called, given the originals of the copies
                and of the values that are inputs, by `id`.
            metadata: the metadata in which copies of variables differ from the originals, by the `id` of the original.

        Returns:
            The closed jaxpr, and what the method returns and writes.
        """
        effects: list[Effects] = []
        originals, containers = _graph_of(self._nodes), containers_of(self._given)

        def function(own: list[Any], given: list[Any]) -> list[Any]:
            copies, args, kwargs = self._filled(dict(zip(inputs, own, strict=True)), given, arguments, metadata or {})
            held = containers_of((args, kwargs))
            contents = [list(items_of(one)) for one in held]
            before = Before(originals, _graph_of(copies))
            known = {id(new): self.values[i] for i, new in zip(inputs, own, strict=True)}
            with within(before.known, known):
                result = self._method(copies[0], *args, **kwargs)
            attributes, values = before.attributes()  # taken apart with the result: both may contain one new node
            pairs = enumerate(zip(held, contents, strict=True))
            changed = [i for i, (one, had) in pairs if not is_same(had, list(items_of(one)))]
            arrays, rebuild = before.taken_apart((result, values, [held[i] for i in changed]))
            numbers = {id(a): i for i, a in enumerate((*own, *given))}
            writes, written = before.writes(numbers, len(arrays))
            effects.append(Effects(rebuild, len(arrays), attributes, [containers[i] for i in changed], writes))
            return [*arrays, *written]

        closed = jax.make_jaxpr(function)(list(inputs.values()), [self.arguments[i] for i in arguments])
        sources, found = Sources(closed.jaxpr), effects[-1]
        return closed, dataclasses.replace(found, writes=[one for one in found.writes if one.changes(sources)])

    def _filled(
        self, own: Mapping[int, Any], given: Sequence[Any], at: Sequence[int], metadata: Mapping[int, Any]
    ) -> tuple[tuple[Any, ...], Any, Any]:
        """Returns copies of the nodes that contain these values, and the arguments with the copies and with the arrays
        `given` in the places `at`."""
        values = [own.get(i, value) for i, value in enumerate(self.values)]
        each = zip(self._leaves, jax.tree.unflatten(self._of_values, values), strict=True)
        copies = self._template.merged([with_raw_value(leaf, v, **metadata.get(id(leaf), {})) for leaf, v in each])
        nodes, arrays = iter(copies[1:]), dict(zip(at, given, strict=True))
        leaves = [next(nodes) if is_node(leaf) else arrays.get(i, leaf) for i, leaf in enumerate(self.arguments)]
        return copies, *jax.tree.unflatten(self._tree, leaves)


def _graph_of(nodes: tuple[Any, ...]) -> list[Any]:
    """Returns the given nodes and the nodes within them, each once. Copies have the same order as their originals."""
    return [node for _, node in nnx.iter_graph(nodes) if is_node(node)]
