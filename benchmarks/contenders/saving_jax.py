"""Saves with gtp_jax's checkpoints, or with plain orbax: `python saving_jax.py JOB`.

Weights are sharded over gtp. If the number of devices is even, they are also restored on another mesh, with tp 2.
"""

from __future__ import annotations

import collections
import functools
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from saving import Clock, job, tell

from gtp_jax.checkpoint import CHECKSUM_EVENT, Checkpoints
from gtp_jax.mesh import make_mesh
from gtp_jax.models import Llama, LlamaConfig
from gtp_jax.nn import abstract_model
from gtp_jax.train import TrainState


class Ours:
    """The checkpoints of gtp_jax."""

    def __init__(self, directory: Path) -> None:
        self._checkpoints = Checkpoints(directory, keep=None)

    def save(self, step: int, state: TrainState) -> None:
        self._checkpoints.save(step, state)

    def wait(self) -> None:
        self._checkpoints.wait()

    def restore(self, step: int, like: TrainState) -> Any:
        return self._checkpoints.restore(like, step)[0]


class Orbax:
    """Plain orbax with its defaults, which saves in the background and computes no checksums."""

    def __init__(self, directory: Path) -> None:
        self._manager = ocp.CheckpointManager(directory)

    def save(self, step: int, state: TrainState) -> None:
        self._manager.save(step, args=ocp.args.StandardSave(_plain(state)))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self, step: int, like: TrainState) -> Any:
        return self._manager.restore(step, args=ocp.args.StandardRestore(_plain(like)))


def _plain(state: TrainState) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def shapes(model: LlamaConfig, **degrees: int) -> TrainState:
    """Returns the shapes and shardings of a training state."""
    with jax.set_mesh(make_mesh(**degrees)):
        return TrainState.create(abstract_model(lambda rngs: Llama(model, rngs=rngs)), optax.adamw(1e-3))


def filled(like: TrainState) -> TrainState:
    """Returns a state whose floats are random numbers, because zeros would compress to almost nothing."""

    @functools.cache
    def maker(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
        if not jnp.issubdtype(dtype, jnp.floating):
            return jax.jit(lambda key: jnp.zeros(shape, dtype), out_shardings=sharding)
        return jax.jit(lambda key: jax.random.normal(key, shape, dtype), out_shardings=sharding)

    leaves, tree = jax.tree.flatten(like)
    made = []
    for index, leaf in enumerate(leaves):
        made.append(jax.block_until_ready(maker(leaf.shape, leaf.dtype, leaf.sharding)(jax.random.key(index))))
    return jax.tree.unflatten(tree, made)


def main() -> None:
    """Saves, restores, and restores on another mesh if there is one, in rounds."""
    given = job()
    count = jax.device_count()
    model = LlamaConfig(**given.model)
    like = shapes(model, gtp=count)
    other = shapes(model, gtp=count // 2, tp=2) if count % 2 == 0 else None
    state = filled(like)
    checksums: dict[str, float] = collections.defaultdict(float)
    _listen(checksums)
    versions = {"jax": jax.__version__, "orbax": ocp.__version__}
    tell(state_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state)), versions=versions)
    saver = {"gtp_jax": Ours, "orbax": Orbax}[given.variant](Path(given.directory))
    for step in range(given.rounds + 1):
        os.sync()
        checksums.clear()
        clock = Clock()
        saver.save(step, state)
        blocked = clock.seconds()
        saver.wait()
        tell(blocked=blocked, saved=clock.seconds(), save_checksums=sum(checksums.values()))
        checksums.clear()
        clock = Clock()
        jax.block_until_ready(saver.restore(step, like))
        tell(restored=clock.seconds(), restore_checksums=sum(checksums.values()))
        if other is not None:
            clock = Clock()
            jax.block_until_ready(saver.restore(step, other))
            tell(moved=clock.seconds())
        shutil.rmtree(Path(given.directory) / str(step))


def _listen(seconds: dict[str, float]) -> None:
    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event == CHECKSUM_EVENT:
            seconds[event] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)


if __name__ == "__main__":
    main()
