"""Stamps the layers of a chain, so that a recorder can say which layer a device has come to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ..collectives import tied
from ..flight_recorder import PLACES, Place, stamp
from ._events import Barrier, Compute, Event, Loop
from ._floats import is_real, with_changed
from ._stage import Stage

Tree = Any


class Stamper:
    """Stamps the layers of one pass of a chain: where each begins, and where it has been computed, which is followed by
    the wait for the collectives that were meant to run meanwhile.

    Args:
        stages: the stages of the chain.
        direction: the pass, `forward` or `backward`.
    """

    def __init__(self, stages: Sequence[Stage], direction: str) -> None:
        self._direction = direction
        self._names: list[tuple[str, int]] = []  # for each stage, the name and the number of its first layer
        last, first = "", 0
        for stage in stages:
            name = stage.source or stage.name
            first = first if stage.stacked and name == last else 0
            self._names.append((name, first))
            last, first = name, first + stage.length
        self._stacked = [stage.stacked for stage in stages]

    def begins(self, tree: Tree, event: Compute, origin: Any, loop: Loop | None) -> Tree:
        """Returns the values, but not before a stamp that says that a layer begins; the stamp waits for them.

        Args:
            tree: the values that the layer receives.
            event: the layer.
            origin: 0; in a loop's body, the layer of the iteration.
            loop: the loop, if the layer is in its body.
        """
        return self._stamped(tree, event, origin, loop, f"in {self._direction}", ())

    def computed(self, tree: Tree, event: Compute, origin: Any, loop: Loop | None, events: Sequence[Event]) -> Tree:
        """Returns the values that a layer has computed, but not before a stamp that says so; see `begins`.

        Args:
            tree: the values.
            event: the layer.
            origin: 0; in a loop's body, the layer of the iteration.
            loop: the loop, if the layer is in its body.
            events: the events of which the layer is one.
        """
        return self._stamped(tree, event, origin, loop, f"after {self._direction}", _beside(event, events))

    def _stamped(
        self, tree: Tree, event: Compute, origin: Any, loop: Loop | None, text: str, beside: Sequence[Any]
    ) -> Tree:
        if not PLACES.stamping:
            return tree
        start, stop = (0, 1) if loop is None else (loop.start, loop.stop)
        places = [
            Place(
                f"{text} of {self._name(event, layer)}",
                tuple(f"{type(other).__name__.lower()} of {self._name(other, layer)}" for other in beside),
            )
            for layer in range(start, stop)
        ]
        return _stamped(tree, PLACES.id_of(places) + origin - start)

    def _name(self, event: Any, origin: int) -> str:
        name, first = self._names[event.stage]
        return f"{name}[{first + origin + event.layer}]" if self._stacked[event.stage] else name


def stamped(tree: Tree, text: str) -> Tree:
    """Returns the same values, but if a recorder runs, not before a stamp, which waits for them.

    Args:
        tree: a pytree of arrays.
        text: the place, as in `Place`.
    """
    return _stamped(tree, PLACES.id_of([Place(text)])) if PLACES.stamping else tree


def _stamped(tree: Tree, id: Any) -> Tree:
    one = jnp.asarray(id, jnp.int32)[None]
    return with_changed(tree, is_real, lambda arrays: _tied_to_stamp(arrays, one))


def _beside(event: Compute, events: Sequence[Any]) -> list[Any]:
    """Returns the events that must end between the end of a layer and the beginning of the next: what runs meanwhile
    until the next barrier, and what the next layer still needs after it."""
    at = next(place for place, each in enumerate(events) if each is event)
    is_end = lambda each: isinstance(each, Barrier | Compute | Loop)  # noqa: E731
    before = [*itertools.takewhile(lambda each: not is_end(each), reversed(events[:at]))]
    after = [*itertools.takewhile(lambda each: not isinstance(each, Compute | Loop), events[at + 1 :])]
    following = next((each for each in events[at + 1 :] if isinstance(each, Compute)), None)
    barrier = next((place for place, each in enumerate(after) if isinstance(each, Barrier)), len(after))
    needed = [each for each in after[barrier + 1 :] if following and _layer(each) == _layer(following)]
    return [*[each for each in before if _layer(each) != _layer(event)], *after[:barrier], *needed]


def _layer(event: Any) -> tuple[int, int] | None:
    return None if isinstance(event, Barrier) else (event.stage, event.layer)


@jax.custom_jvp
def _tied_to_stamp(arrays: list[Any], id: jax.Array) -> list[Any]:
    return _outside_vmap(arrays, id)


@custom_vmap
def _outside_vmap(arrays: list[Any], id: jax.Array) -> list[Any]:
    arrays, id = lax.optimization_barrier((arrays, id))
    return tied(arrays, stamp(id, arrays))


@_outside_vmap.def_vmap
def _inside_vmap(size: int, batched: Any, arrays: list[Any], id: jax.Array) -> tuple[list[Any], list[bool]]:
    del size, id  # nothing is stamped
    return arrays, batched[0]


@_tied_to_stamp.defjvp
def _tied_jvp(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
    return _tied_to_stamp(*primals), tangents[0]
