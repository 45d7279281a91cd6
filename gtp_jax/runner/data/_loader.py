"""Builds batches as global arrays: each process builds only the rows that its devices need."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...mesh import Roles
from ._rows import Rows


@dataclasses.dataclass(frozen=True, eq=False)
class Loader:
    """The batches of a run, by step.

    Attributes:
        windows: the rows that batches are made of.
        batch: the number of sequences that this loader loads per step, over all devices of `mesh`.
        mesh: the mesh, with the axes that shard the batch.
        roles: which axes of the mesh these are.
        fill: the number of rows of weight 0 that are appended to the batch, so that the number of rows is a multiple
            of the number of ranks. The loss does not count them.
        pad: the number of places without a target that are appended to each row, so that ranks can divide it. In packed
            rows they are a segment of their own. They change no loss, as no earlier token sees them.
        rows: `(first, whole)`: this loader loads the rows from `first` of each step's batch, which has `whole` rows;
            other loaders load the rest. By default, this loader loads all of them.

    Raises:
        ValueError: if `batch + fill` is not a multiple of the number of ranks that shard the batch.
    """

    windows: Rows
    batch: int
    mesh: Mesh
    roles: Roles = Roles()
    fill: int = 0
    pad: int = 0
    rows: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        ranks = int(np.prod([self.mesh.shape[axis] for axis in self.roles.batch]))
        if self.fill < 0 or self.batch < 1 or (self.batch + self.fill) % ranks:
            filled = f" and `fill` {self.fill}" if self.fill else ""
            raise ValueError(
                f"`batch` is {self.batch}{filled}; it is sharded over {' x '.join(self.roles.batch)} = {ranks} ranks "
                "and must be a multiple of that."
            )

    def at(self, step: int) -> dict[str, jax.Array]:
        """Returns the batch of a step: arrays of shape `(batch + fill, seq + pad)`, with rows sharded over
        `roles.batch`."""
        sharding = NamedSharding(self.mesh, PartitionSpec(self.roles.batch))
        first, whole = (0, self.batch) if self.rows is None else self.rows

        @functools.cache  # tp ranks need the same rows
        def rows(start: int, stop: int) -> dict[str, np.ndarray]:
            places = np.arange(start, stop, dtype=np.int64)
            inside = places < self.batch
            found = self.windows.rows(step * whole + first + np.where(inside, places, 0))
            if self.fill:
                weights = found.get("weights", np.ones(found["tokens"].shape, np.float32))
                found["weights"] = weights * inside[:, None].astype(np.float32)
            return {name: _padded(name, array, self.pad) for name, array in found.items()}

        def part(name: str, index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(shape[0])
            return rows(start, stop)[name]

        shape = (self.batch + self.fill, self.windows.seq + self.pad)
        kinds = {**self.windows.kinds, **({"weights": np.float32} if self.fill else {})}
        # the dtype is given because a process with none of the mesh's devices makes no row to infer it from
        return {
            name: jax.make_array_from_callback(shape, sharding, functools.partial(part, name), dtype=kind)
            for name, kind in kinds.items()
        }

    def steps(self, start: int, stop: int) -> Iterator[dict[str, jax.Array]]:
        """Yields the batches of steps `start` to `stop` (exclusive), each built while the previous one is in use."""
        return ahead(self.at, start, stop)


def _padded(name: str, array: np.ndarray, places: int) -> np.ndarray:
    """Appends places to the rows of an array of a batch."""
    value = {"targets": -1, "segment_ids": array[:, -1:] + 1}.get(name, 0)
    return np.concatenate([array, np.full((len(array), places), value, array.dtype)], axis=1) if places else array


def ahead[T](at: Callable[[int], T], start: int, stop: int) -> Iterator[T]:
    """Yields `at(step)` for steps `start` to `stop` (exclusive), each built while the previous one is in use."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
    try:
        pending = thread.submit(at, start) if start < stop else None
        for step in range(start, stop):
            assert pending is not None
            batch = pending.result()
            pending = thread.submit(at, step + 1) if step + 1 < stop else None
            yield batch
    finally:  # without waiting, because a loop left early may end when the interpreter does and can join no thread
        thread.shutdown(wait=False)
