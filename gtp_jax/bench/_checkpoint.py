"""Checkpoints of a model's training state beside plain orbax: saving, restoring, restoring onto another mesh.

What is measured is warm: programs are compiled and files lie in the page cache, for all alike. Rivals take turns, so
that a slow moment of the machine meets them all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

from ..checkpoint import CHECKSUM_EVENTS, Checkpoints
from ..mesh import make_mesh
from ..models import Llama, LlamaConfig
from ..nn import abstract_model
from ..train import TrainState


@dataclasses.dataclass
class CheckpointTimes:
    """Seconds of each round, by what was done.

    Attributes:
        who: `gtp_jax`, `orbax` or `torch DCP`.
        state_bytes: of the arrays.
        blocked: until training may go on after a save began.
        saved: until the save is committed.
        restored: onto the mesh that saved.
        moved: onto another mesh; empty if there is none.
        save_checksums, restore_checksums: what of `saved` and of `restored` went into checksums.
    """

    who: str
    state_bytes: int
    blocked: list[float] = dataclasses.field(default_factory=list)
    saved: list[float] = dataclasses.field(default_factory=list)
    restored: list[float] = dataclasses.field(default_factory=list)
    moved: list[float] = dataclasses.field(default_factory=list)
    save_checksums: list[float] = dataclasses.field(default_factory=list)
    restore_checksums: list[float] = dataclasses.field(default_factory=list)

    def median(self, what: str) -> float | None:
        """Seconds; `None` if it was not measured."""
        seconds = getattr(self, what)
        return statistics.median(seconds) if seconds else None

    def ratio(self, what: str, of: str) -> float | None:
        """The median of `what` as a share of that of another."""
        part, whole = self.median(what), self.median(of)
        return None if part is None or whole is None else part / whole


class _Saver(Protocol):
    def save(self, state: Any) -> None: ...
    def wait(self) -> None: ...
    def restore(self, like: Any) -> Any: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


class _Ours:
    def __init__(self, directory: Path) -> None:
        self._checkpoints = Checkpoints(directory, keep=1)
        self._step = 0

    def save(self, state: TrainState) -> None:
        self._step += 1
        self._checkpoints.save(self._step, state)

    def wait(self) -> None:
        self._checkpoints.wait()

    def restore(self, like: TrainState) -> Any:
        return self._checkpoints.restore(like)[0]

    def clear(self) -> None:
        pass  # the next save prunes, as in a run

    def close(self) -> None:
        self._checkpoints.close()


class _Orbax:
    """With its defaults, which save in the background and in parallel over replicas."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

    def save(self, state: TrainState) -> None:
        self._checkpointer.save(self._directory, args=ocp.args.StandardSave(_plain(state)))

    def wait(self) -> None:
        self._checkpointer.wait_until_finished()

    def restore(self, like: TrainState) -> Any:
        return self._checkpointer.restore(self._directory, args=ocp.args.StandardRestore(_plain(like)))

    def clear(self) -> None:
        shutil.rmtree(self._directory)

    def close(self) -> None:
        self._checkpointer.close()


def _plain(state: TrainState) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def measure_checkpoints(
    model: LlamaConfig, directory: Path, *, rounds: int, report: Callable[[str], None]
) -> list[CheckpointTimes]:
    """Measures on all devices of this process: weights cut over gtp, then moved to half the gtp and tp 2.

    Args:
        model: whose parameters and AdamW moments are saved, filled with random numbers.
        directory: for the files, three states at most.
        rounds: after one that is not counted.
        report: told what was done, `steps_of(rounds)` times.

    Raises:
        ValueError: if the sizes of the model need padding, with which plain orbax cannot restore on another mesh.
    """
    count = jax.device_count()
    state = _filled(_shapes(model, gtp=count))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    other = _shapes(model, gtp=count // 2, tp=2) if count % 2 == 0 else None
    if any(layout is not None for layout in jax.tree.leaves(state.skeleton.layouts, is_leaf=lambda x: x is None)):
        raise ValueError(f"the model's weights need padding on {count} devices, which plain orbax does not take off.")
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    savers: dict[str, _Saver] = {"gtp_jax": _Ours(directory / "gtp_jax"), "orbax": _Orbax(directory / "orbax")}
    times = {who: CheckpointTimes(who, state_bytes) for who in savers}
    for index in range(rounds + 1):
        for who, saver in savers.items():
            measured = _round(saver, state, like, other)
            if index:
                for what, seconds in measured.items():
                    getattr(times[who], what).append(seconds)
            report(who if index else f"{who}, first")
    for saver in savers.values():
        saver.close()
    return list(times.values())


def steps_of(rounds: int) -> int:
    """How many reports `measure_checkpoints` makes."""
    return 2 * (rounds + 1)


def state_shapes(model: LlamaConfig) -> list[tuple[int, ...]]:
    """Shapes of the float32 arrays of a model's training state."""
    like = TrainState.create(abstract_model(lambda rngs: Llama(model, rngs=rngs)), optax.adamw(1e-3))
    return [leaf.shape for leaf in jax.tree.leaves(like) if leaf.shape]


def float32_bytes(shapes: Sequence[Sequence[int]]) -> int:
    """Of all of them together."""
    return sum(4 * math.prod(shape) for shape in shapes)


def _round(saver: _Saver, state: Any, like: Any, other: Any) -> dict[str, float]:
    jax.block_until_ready(state)
    found: dict[str, float] = {}
    with _checksum_seconds() as checksums:
        begin = time.perf_counter()
        saver.save(state)
        found["blocked"] = time.perf_counter() - begin
        saver.wait()
        found["saved"] = time.perf_counter() - begin
    found["save_checksums"] = sum(checksums.values())
    with _checksum_seconds() as checksums:
        found["restored"] = _seconds(lambda: saver.restore(like))
    found["restore_checksums"] = sum(checksums.values())
    if other is not None:
        found["moved"] = _seconds(lambda: saver.restore(other))
    saver.clear()
    return found


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - begin


_listening: list[dict[str, float]] = []


@contextlib.contextmanager
def _checksum_seconds() -> Iterator[dict[str, float]]:
    """Seconds by event, of what happens inside."""
    _register()
    seconds: dict[str, float] = defaultdict(float)
    _listening.append(seconds)
    try:
        yield seconds
    finally:
        _listening.remove(seconds)


@functools.cache
def _register() -> None:
    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        for seconds in _listening if event in CHECKSUM_EVENTS else ():
            seconds[event] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)


def _shapes(model: LlamaConfig, **degrees: int) -> TrainState:
    with jax.set_mesh(make_mesh(**degrees)):
        return TrainState.create(abstract_model(lambda rngs: Llama(model, rngs=rngs)), optax.adamw(1e-3))


def _filled(like: TrainState) -> TrainState:
    """Random numbers, for zeros would be compressed to nothing."""

    @functools.cache
    def maker(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
        if not jnp.issubdtype(dtype, jnp.floating):
            return jax.jit(lambda key: jnp.zeros(shape, dtype), out_shardings=sharding)
        return jax.jit(lambda key: jax.random.normal(key, shape, dtype), out_shardings=sharding)

    leaves, tree = jax.tree.flatten(like)
    filled = []
    for index, leaf in enumerate(leaves):
        array = maker(leaf.shape, leaf.dtype, leaf.sharding)(jax.random.key(index))
        filled.append(jax.block_until_ready(array))
    return jax.tree.unflatten(tree, filled)
