"""The batches of a program: reads any iterable by position, and places batches on a mesh."""

from __future__ import annotations

import base64
import collections
import copy
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..._foreign import brief
from ...mesh import Roles
from ...train import check_numbers
from ..data import ahead

# How many of the batches that were read last are kept: those in flight, those that are read ahead, and the one that is
# diagnosed.
_KEPT = 4

# The key in a checkpoint's `extra`.
_DATA = "data"


class DataSet:
    """The batches of an iterable, by position. After its last batch, the iterable is read again from the first.

    Args:
        data: the batches: a sequence, an iterable, or a function that returns one of these and is called for each pass.
            If its iterators have `get_state` and `set_state`, as grain's do, a checkpoint stores their state.
        name: the name of the argument, for messages.

    Raises:
        TypeError: if `data` is nothing of this.
        ValueError: if it has no batches.
    """

    def __init__(self, data: Any, name: str = "data") -> None:
        self.name = name
        self._lock = threading.RLock()
        self._sequence: Any = None
        self._once = False
        self._make = self._maker(data)
        self._iterator: Any = None
        self._pass = 0  # the number of the pass that the iterator makes
        self._next = 0  # the position of the batch that the iterator yields next
        self._latest: collections.OrderedDict[int, tuple[Any, Any]] = collections.OrderedDict()
        if self._sequence is not None and not len(self._sequence):
            raise self._empty()

    def _maker(self, data: Any) -> Callable[[], Iterator[Any]]:
        if isinstance(data, Mapping | str | bytes) or hasattr(data, "dtype"):
            raise TypeError(
                f"`{self.name}` is {'an array' if hasattr(data, 'dtype') else f'a {type(data).__name__}'}, which may "
                "be one batch. Pass the batches: a list, another iterable, or a function that returns one."
            )
        if hasattr(data, "to_iter_dataset"):  # grain's data sets of random access, which leave out what they filter
            data = data.to_iter_dataset()
        elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            self._sequence = data
            return lambda: iter(data)
        if hasattr(data, "__iter__"):
            self._once = iter(data) is data
            return lambda: iter(data)
        if callable(data):
            return lambda: iter(self._called(data))
        raise TypeError(
            f"`{self.name}` is {brief(data)}; it must be the batches: a list, another iterable, or a function without "
            "arguments that returns one."
        )

    def _called(self, make: Callable[[], Any]) -> Any:
        found = make()
        if not hasattr(found, "__iter__"):
            raise TypeError(
                f"`{self.name}` is a function that returned {brief(found)}; it must return the batches, or yield them."
            )
        return found

    @property
    def length(self) -> int | None:
        """The number of batches of one pass; `None` if it is unknown."""
        return None if self._sequence is None else len(self._sequence)

    @property
    def passes_once(self) -> bool:
        """Whether the batches can be read only once, as those of a generator object."""
        return self._once

    @property
    def has_state(self) -> bool:
        """Whether a checkpoint stores where the iterator is."""
        return hasattr(self._opened(), "get_state") and hasattr(self._iterator, "set_state")

    def batch(self, position: int) -> Any:
        """Returns a batch as the iterable yields it.

        Raises:
            ValueError: if there is none, or it was read too long ago.
        """
        with self._lock:
            if self._sequence is not None:
                return self._sequence[position % len(self._sequence)]
            while position >= self._next:
                self._read()
            if position not in self._latest:
                raise ValueError(f"batch {position} of `{self.name}` is no longer in memory.")
            return self._latest[position][0]

    def pass_of(self, batches: int | None) -> Iterator[Any]:
        """Yields the first batches of the iterable, read anew.

        Args:
            batches: how many; all of one pass by default.

        Raises:
            ValueError: if there are none.
        """
        count = 0
        for count, batch in enumerate(self._make(), 1):
            yield batch
            if count == batches:
                break
        if not count:
            raise self._empty()

    def stored(self, position: int) -> dict[str, Any]:
        """Returns what a checkpoint holds about the batches, as JSON values: a digest of the first, and the state of
        the iterator from which it yields the batch at `position`."""
        found: dict[str, Any] = {"first": self.digest}
        if self._sequence is not None:
            found["batches"] = len(self._sequence)
        elif self.has_state:
            with self._lock:
                at = self._latest[position][1] if position in self._latest else self._state()
            found["state"] = at
        return {_DATA: found}

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the first batch."""
        return _digest(self.batch(0))

    def go_to(self, position: int, extra: Mapping[str, Any]) -> str:
        """Moves to the batch at which a checkpoint was saved.

        Args:
            position: the position of the batch.
            extra: the `extra` of the checkpoint.

        Returns:
            What was done, if it takes long; otherwise an empty text.

        Raises:
            ValueError: if the batches differ from those of the checkpoint, or cannot be read again.
        """
        said = extra.get(_DATA)
        if not isinstance(said, dict):
            raise ValueError("the checkpoint does not say what it was trained on, so it is not of `gtp_jax.Trainer`.")
        if self._once and not self.has_state:
            raise ValueError(
                f"`{self.name}` is {brief(self._opened())}, which yields its batches once, so a resumed run cannot "
                "start it anew. Pass the function that makes it, without calling it, or a list."
            )
        if said.get("first") != self.digest or said.get("batches") != self.length:
            raise ValueError(
                f"`{self.name}` differs from what this run was trained on: "
                + (
                    f"it has {self.length} batches, not {said.get('batches')}"
                    if said.get("first") == self.digest
                    else "its first batch has other values"
                )
                + ". Pass the same batches in the same order, or start another run with another `out`."
            )
        if self._sequence is not None:
            return ""
        if ("state" in said) != self.has_state:
            had, has = ("has", "`get_state` and `set_state`") if "state" in said else ("has no", "state")
            raise ValueError(
                f"the checkpoint {had} the state of an iterator, but the iterators of `{self.name}` have "
                f"{'no ' if 'state' in said else ''}{has}. Pass the same kind of data set."
            )
        with self._lock:
            if self.has_state:
                # a function may return other batches for each pass
                while self._pass < said["state"].get("pass", 0):
                    self._start_pass()
                self._iterator.set_state(_from_json(said["state"]))
                self._latest.clear()
                self._next = position
                return ""
        if position:
            self.batch(position - 1)
            return f"read {position:,} batches of `{self.name}` again, because its iterator has no state to restore"
        return ""

    def _opened(self) -> Any:
        if self._iterator is None:
            self._iterator = self._make()
        return self._iterator

    def _state(self) -> Any:
        return {**_to_json(self._opened().get_state()), "pass": self._pass} if self.has_state else None

    def _start_pass(self) -> None:
        self._iterator = self._make()
        self._pass += 1

    def _read(self) -> None:
        """Reads the next batch."""
        state = self._state()
        try:
            batch = next(self._opened())
        except StopIteration:
            if self._once:
                if not self._next:
                    raise self._empty() from None
                raise ValueError(
                    f"`{self.name}` ended after {self._next} batches, and cannot be read again, because it is "
                    f"{brief(self._opened())}. Pass the function that makes it, without calling it, or a list."
                ) from None
            self._start_pass()
            state = self._state()
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise self._empty() from None
        self._latest[self._next] = batch, state
        self._next += 1
        self.digest  # noqa: B018  while the first batch is in memory
        while len(self._latest) > _KEPT:
            self._latest.popitem(last=False)

    def _empty(self) -> ValueError:
        return ValueError(f"`{self.name}` has no batches. Pass at least one.")


class PlacedData:
    """The batches of a data set on a mesh, with rows sharded over the axes that divide a batch.

    Args:
        data: the data set.
        mesh: the mesh.
        roles: the roles of its axes.
        microbatches: the number of microbatches of a step.
    """

    def __init__(self, data: DataSet, mesh: Mesh, roles: Roles, microbatches: int = 1) -> None:
        self.data, self._mesh, self._roles, self._microbatches = data, mesh, roles, microbatches

    @property
    def digest(self) -> str:
        """A digest of the first batch."""
        return self.data.digest

    def stored(self, position: int, /) -> dict[str, Any]:
        """Returns what a checkpoint holds about the batches; see `DataSet.stored`."""
        return self.data.stored(position)

    def go_to(self, position: int, extra: Mapping[str, Any], /) -> str:
        """Moves to the batch at which a checkpoint was saved; see `DataSet.go_to`."""
        return self.data.go_to(position, extra)

    def at(self, position: int, /) -> Any:
        """Returns a batch as global arrays.

        Raises:
            ValueError: if the mesh does not divide its rows.
        """
        return self.placed(self.data.batch(position), position)

    def steps(self, begin: int, end: int, /) -> Iterator[Any]:
        """Yields batches `begin` to `end` (exclusive), each read while the previous one is in use."""
        return ahead(self.at, begin, end)

    def placed(self, batch: Any, position: int) -> Any:
        """Returns a batch of the data set as global arrays; see `at`."""
        name = f"batch {position} of `{self.data.name}`"
        try:
            check_numbers(batch)
        except TypeError as error:
            raise TypeError(str(error).replace("`batch`", name, 1)) from None
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        if not any(np.ndim(leaf) for _, leaf in leaves):
            raise ValueError(f"{name} is {brief(batch)}; it must be a pytree of arrays with a row for each example.")
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self._global(leaf, name + jax.tree_util.keystr(path)), batch
        )

    def _global(self, leaf: Any, name: str) -> jax.Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf
        array = np.asarray(leaf)
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        sizes = {axis: self._mesh.shape[axis] for axis in self._roles.batch if axis in self._mesh.shape}
        factors = {**sizes, "microbatches": self._microbatches}
        parts = math.prod(factors.values())
        if array.ndim and (not len(array) or len(array) % parts):
            raise ValueError(
                f"{name} has {len(array)} rows, which must be a multiple of {' * '.join(factors)} = "
                f"{' * '.join(map(str, factors.values()))} = {parts}. Make batches of "
                f"{max(1, len(array) // parts) * parts} rows, for instance, and leave out a last batch with fewer."
            )
        spec = PartitionSpec(tuple(sizes)) if array.ndim else PartitionSpec()
        return jax.make_array_from_callback(array.shape, NamedSharding(self._mesh, spec), lambda index: array[index])


def rows_of(batch: Any) -> int:
    """Returns the number of rows of a batch."""
    return next(np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf))


def in_words(batch: Any) -> str:
    """Returns the names, shapes and dtypes of the arrays of a batch."""
    return ", ".join(
        f"{jax.tree_util.keystr(path, simple=True, separator='.')} {np.shape(leaf)} {np.asarray(leaf).dtype}".strip()
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    )


def _digest(batch: Any) -> str:
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _to_json(state: Any) -> Any:
    """Returns the state of an iterator, which is bytes or JSON values, as JSON values of their own."""
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    # some iterators return the very object that they change as they go on
    return {"json": copy.deepcopy(state)}


def _from_json(stored: Mapping[str, Any]) -> Any:
    return base64.b64decode(stored["bytes"]) if "bytes" in stored else stored["json"]
