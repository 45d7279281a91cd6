"""Saves, lists and restores the checkpoints in a directory."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Self, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from ..formats import QuantizedArray
from ..mesh import Path, of_all_processes, with_paths
from ..recipes import Recipe, check_recipe
from ._agreement import read_together
from ._checksums import DamagedCheckpoint, differences
from ._digest import Digests
from ._leaf import Leaf, check_has_params, check_savable, leaves
from ._manifest import FILES, SAVE, check, check_format, complete, manifest
from ._place import check_encodes
from ._quiet import keep_quiet, work_abandoned
from ._retention import Retention
from ._static import static_fields
from ._step import ARRAYS, loss_of, new_manager, read_arrays, read_manifest, read_step_files, write_step
from ._steps import MOST, absolute, agreed_steps, find_step, no_step, refused_write, set_aside, steps_in, whole_step
from ._stored import StoredArray
from ._streamed import StreamedArray
from ._whole import check_bound, step_damage

_State = TypeVar("_State")

# How many seconds to wait for the background work of a failed save: it waits for the other processes, which may be
# waiting for this one.
_PEERS_S = 2.0

# The attribute of a state that holds its parameters.
_PARAMS = "params"
# The name below which a checkpoint holds codes of parameters.
CODES = "codes"


class _Abandoned(Exception):
    """The error that background work gets instead of a manifest, if its save failed in the foreground."""


class Checkpoints:
    """The checkpoints of one training run.

        with Checkpoints("run/checkpoints", keep=3) as checkpoints:
            if checkpoints.latest() is not None:
                state, extra = checkpoints.restore(state)
            ...
            checkpoints.save(step, state, {"batches": 1200})

    A checkpoint holds logical arrays (unpadded, in plain nested dicts), so any mesh restores what any other saved, bit
    for bit. Each process writes and reads its own share. All processes must make the same calls in the same order, on a
    shared directory. Only one run may write to a directory at a time; others may read it meanwhile. Every method raises
    TypeError for a step that is not a whole number.

    Args:
        directory: the directory of the steps, created by the first save: a path, or a URL that orbax supports
            (`gs://...`).
        keep: how many of the latest steps to keep; `None` keeps all.
        keep_best: how many steps of the lowest loss to keep in addition, among those saved with a loss.
        read_only: whether never to write; the directory then need not be writable.
        guard: called in the first process before anything is published, deleted or renamed; raises to prevent it. A run
            uses it to check that it still owns the directory.

    Raises:
        ValueError: if `keep` is less than 1, or `keep_best` less than 0, or if the path of a directory to be written is
            not UTF-8.
        TypeError: if `keep` or `keep_best` is not a whole number.
        OSError: if `directory` cannot be written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        *,
        keep_best: int = 0,
        read_only: bool = False,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        keep, keep_best = keep if keep is None else whole_step(keep, "keep"), whole_step(keep_best, "keep_best")
        if keep_best < 0:
            raise ValueError(f"`keep_best` is {keep_best}; it must be a whole number of at least 0.")
        if keep is not None and keep < 1:
            raise ValueError(f"`keep` is {keep}; at least 1 step must be kept, or `None` for all of them.")
        self._directory = absolute(directory, writable=not read_only)
        self._retention = Retention(keep, keep_best, functools.partial(loss_of, self._directory))
        self._read_only, self._guard = read_only, guard
        self._manager: ocp.CheckpointManager | None = None
        self._failed: list[Exception] = []
        keep_quiet()

    def steps(self) -> list[int]:
        """Returns the committed steps, ascending, without a step that is still being written."""
        return sorted(steps_in(self._directory))

    def latest(self) -> int | None:
        """Returns the latest committed step, or `None` if there is none."""
        return max(steps_in(self._directory), default=None)

    def best(self) -> int | None:
        """Returns the committed step with the lowest loss, or `None` if none was saved with a loss."""
        losses = [(loss, step) for step in self.steps() if not math.isnan(loss := loss_of(self._directory, step))]
        return min(losses)[1] if losses else None

    def save(
        self,
        step: int,
        state: Any,
        extra: dict[str, Any] | None = None,
        *,
        loss: float | None = None,
        recipe: Recipe | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Saves a train state in the background.

        When this returns, the arrays have been copied off the devices and may be donated. The step appears under its
        name atomically, when it is complete; then the oldest steps beyond `keep` and `keep_best` are deleted. Errors of
        the background work are raised by the next call of `wait`, `close` or a method that takes a step; call
        `check_save` after each training step to hear of them at once. The first save removes the half-written steps of
        killed runs.

        Args:
            step: the number of the step, greater than every earlier one.
            state: a train state of jax arrays.
            extra: a dict that JSON can hold, to be returned with the state; copied now; the same in every process.
            loss: the loss by which `keep_best` and `best` rank the step, the same in every process.
            recipe: the recipe that the state was trained with, for the record. Codes of trained weights are not saved,
                because each step computes them from the parameters; so the run may continue with any recipe. The
                exception is delayed scaling (`gtp_jax.recipes.FP8Delayed`), whose amaxes are part of the state: they
                restore only to a state with the same `history`.
            files: the contents of files to store with the state, such as a tokenizer's, by name; at most 64 files of
                64 MiB each, the same in every process. `files` returns them byte for byte.

        Raises:
            ValueError: if `step` is negative, above 2^63 - 1 or not above the latest one in the directory, if `state`
                has been donated, if an array is empty, complex or of a type that orbax does not store, if two arrays
                would have one path on disk, if the copies of a replicated array differ, if `extra` is too large or too
                deeply nested, if there are too many files or a file is too large, if the name of a file is not a plain
                file name, or if `read_only` is set.
            OSError: if the disk is full or has become read-only; earlier steps are unchanged.
            TypeError: if `step` is not a whole number, if a leaf of `state` is not a jax array, if JSON cannot hold
                `extra`, if `recipe` is not a recipe, or if a file's content is not bytes.
        """
        step = self._checked(step)
        check_recipe(recipe)
        saved = leaves(state)
        check_savable(saved)
        static, files = static_fields(state), dict(files or {})
        content = manifest(step, saved, extra, static=static, files=files, loss=loss, recipe=recipe)
        arrays = {leaf.name: leaf.to_disk() for leaf in saved}
        digests, description = Digests(arrays), Future[str]()
        try:
            with self._failures():
                # Not created before the first save, because it removes what looks half-written: if this object only
                # reads, that may be another run's save in progress.
                if self._manager is None:
                    self._check_guard()
                    self._failed = []
                    self._manager = new_manager(
                        self._directory, self._retention, guard=self._guard, failed=self._failed.append
                    )
                write_step(self._manager, step, arrays, description, content[SAVE], files)
            description.set_result(complete(content, digests.result()))
        finally:
            if not description.done():
                # The background work must not wait forever for the manifest. An exception is set instead of cancelling,
                # because orbax does not treat a cancelled future as an error: it would go on and delete the steps that
                # this one was to replace.
                description.set_exception(_Abandoned(f"step {step} was not saved"))
                self._abandon()

    def save_params(
        self,
        step: int,
        params: Mapping[str, StreamedArray],
        extra: dict[str, Any] | None = None,
        *,
        files: Mapping[str, bytes] | None = None,
        codes: Mapping[str, QuantizedArray] | None = None,
    ) -> None:
        """Saves parameters that are computed while they are written, one part in memory at a time. One process only.

        Every part is computed twice: for its digest, then for the disk. The step is committed when this returns.

        Args:
            step: the number of the step, greater than every earlier one.
            params: the arrays by their paths, joined by slashes.
            extra: as in `save`.
            files: as in `save`.
            codes: codes of some of the parameters, by the same paths, with a `StreamedArray` instead of each array.
                They are saved in addition to the parameters, and read with `restore_part`.

        Raises:
            ValueError: as in `save`.
            TypeError: if `step` is not a whole number, JSON cannot hold `extra`, or a file's content is not bytes.
        """
        step, files = self._checked(step), dict(files or {})
        tree = {f"{_PARAMS}/{name}": array for name, array in params.items()}
        tree |= {f"{CODES}/{name}": quantized for name, quantized in (codes or {}).items()}
        streamed = {"/".join(path): array for path, array in with_paths(tree)}
        saved, digests = [], {}
        for name, array in streamed.items():
            saved.append(Leaf(tuple(name.split("/")), jax.ShapeDtypeStruct(array.shape, array.dtype)))
            digests[name] = array.digest()
        description: Future[str] = Future()
        content = manifest(step, saved, extra, static=static_fields(tree), files=files)
        description.set_result(complete(content, digests))
        self.close()
        self._check_guard()  # because the manager deletes what looks half-written
        # By default orbax creates directories in the background; they must exist before the first part is written.
        manager = new_manager(self._directory, self._retention, background=False, guard=self._guard)
        with self._failures(), contextlib.closing(manager):
            write_step(manager, step, streamed, description, content[SAVE], files)

    def arrays(self, step: int | None = None) -> dict[str, StoredArray]:
        """Returns a step's arrays by name. Reads none of them: each can be read in part.

        Raises:
            FileNotFoundError: if there is no such step.
            ValueError: if the manifest is missing or damaged, if the arrays were not saved with it, or if this version
                would misread them.
        """
        check_encodes(self._directory)
        path = self._path(step)
        content = read_manifest(path)
        check_format(content, f"the checkpoint {path}")
        check_bound(path, content)
        return {
            name: StoredArray(name, tuple(leaf["shape"]), leaf["dtype"], leaf["digest"], path / ARRAYS)
            for name, leaf in content["leaves"].items()
        }

    def restore(self, state_like: _State, step: int | None = None) -> tuple[_State, dict[str, Any]]:
        """Restores a train state with the shardings of another.

        Args:
            state_like: a train state of jax arrays, or of `jax.ShapeDtypeStruct` with shardings. Not consumed.
            step: the step to restore; the latest by default.

        Returns:
            The state, and the `extra` it was saved with.

        Raises:
            FileNotFoundError: if there is no such step.
            ValueError: if the arrays or static fields of the checkpoint differ from those of `state_like`. Names their
                paths, and is raised before any array is read.
            DamagedCheckpoint: a `ValueError`, if files are missing or have changed since they were written, or if an
                array's values differ from those saved; raised in all processes.
            OSError: if files cannot be read after several attempts.
        """
        content, arrays = self._read(state_like, step)
        return jax.tree.unflatten(jax.tree.structure(state_like), arrays), content["extra"]

    def restore_last_whole(
        self, state_like: _State, note: Callable[[int, DamagedCheckpoint], None] = lambda step, error: None
    ) -> tuple[_State, dict[str, Any], int]:
        """Restores the latest step that is not damaged, the same step in all processes. Deletes and renames nothing.

        Falls back to an earlier step only if damage is proven; see `restore`.

        Args:
            state_like: as in `restore`.
            note: called with each step that is skipped, and its error.

        Returns:
            The state, the `extra` it was saved with, and its step.

        Raises:
            FileNotFoundError: if there is no step.
            DamagedCheckpoint: the error of the latest step, if all steps are damaged.
            ValueError, OSError: as in `restore`.
        """
        self.wait()
        first: DamagedCheckpoint | None = None
        for step in reversed(agreed_steps(self._directory)):
            try:
                return *self.restore(state_like, step), step
            except DamagedCheckpoint as error:
                note(step, error)
                first = first or error
        if first is not None:
            raise first
        raise no_step(self._directory)

    def set_aside_after(self, step: int, damaged: Collection[int] = ()) -> list[str]:
        """Renames the steps after a given one, so that a run that continues from it can save them again. Every process
        must call this.

        The renamed directories no longer count as steps: they are not listed, counted by `keep`, or pruned. Rename one
        back to use it again.

        Args:
            step: the step that the run continues from.
            damaged: which of the later steps are named as damaged; the others are named as abandoned.

        Returns:
            The new paths.
        """
        step, damaged = whole_step(step), {whole_step(one, "damaged") for one in damaged}
        self.close()
        self._check_guard()
        later = [one for one in agreed_steps(self._directory) if one > step]
        paths = steps_in(self._directory)
        kept = [str(set_aside(paths[one], "damaged" if one in damaged else "abandoned")) for one in later]
        if later:
            of_all_processes(np.int32(0))  # a barrier: no process lists the steps before they are renamed
        return kept

    def restore_params(self, state_like: Any, step: int | None = None) -> dict[str, Any]:
        """Restores only the parameters, from any checkpoint: a run's, or an imported one.

        Args:
            state_like: a `TrainState` as in `restore`; only its parameters are restored.
            step: the step to restore; the latest by default.

        Returns:
            A tree like `state_like.params`, with the checkpoint's values.

        Raises:
            TypeError: if `state_like` has no attribute `params` that holds arrays. A mapping is refused, and so is an
                `nnx.State`, which is a mapping.
            FileNotFoundError, ValueError, OSError: as in `restore`.
        """
        check_has_params(state_like)
        _, arrays = self._read(state_like, step, part=f"{_PARAMS}/")
        return jax.tree.unflatten(jax.tree.structure(state_like.params), arrays)

    def restore_part(
        self, like: dict[str, Any], part: str, step: int | None = None, padded: Mapping[Path, Any] | None = None
    ) -> dict[str, Any]:
        """Restores the arrays whose names begin with `part`.

        Args:
            like: nested dict of them, from the root of the state on, as in `restore`.
            part: the beginning of their names, such as `opt_state/0/mu/`.
            step: which step; the latest by default.
            padded: the layouts of the parameters whose arrays are padded, by path (`ModelDef.padded`).

        Raises:
            FileNotFoundError, ValueError: as in `restore`.
        """
        _, arrays = self._read(like, step, part=part, padded=padded)
        return jax.tree.unflatten(jax.tree.structure(like), arrays)

    def _read(
        self, state_like: Any, step: int | None, part: str = "", padded: Mapping[Path, Any] | None = None
    ) -> tuple[dict[str, Any], list[jax.Array]]:
        """Returns a step's manifest, and those of its arrays whose names begin with `part`."""
        check_encodes(self._directory)
        chosen = [leaf for leaf in leaves(state_like, padded) if leaf.name.startswith(part)]
        path = self._path(step)
        content = read_together(lambda: read_manifest(path), path)
        check_format(content, f"the checkpoint {path}")
        check(content, chosen, static_fields(state_like), f"the checkpoint {path}", part)
        read_together(lambda: check_bound(path, content), path)
        if not part and content.get(FILES):  # a run must not go on from a step whose files are damaged
            read_together(lambda: read_step_files(path, content), path)
        stored = read_together(lambda: read_arrays(path, chosen, partial=bool(part)), path)
        read = {leaf.name: leaf.of_disk(array) for leaf, array in zip(chosen, stored, strict=True)}
        digests = Digests(read).result()
        if lines := differences({name: content["leaves"][name]["digest"] for name in digests}, digests):
            raise DamagedCheckpoint(path, lines)
        return content, [leaf.to_memory(array) for leaf, array in zip(chosen, stored, strict=True)]

    def manifest(self, step: int | None = None) -> dict[str, Any]:
        """Returns a step's manifest: format, versions, step, recipe, loss, extra; each array's shape, dtype and digest.

        Reads in this process alone, so it also works before `jax.distributed.initialize`.

        Raises:
            FileNotFoundError: if there is no such step.
            ValueError: if the manifest is missing or damaged.
        """
        return read_manifest(self._path(step, together=False))

    def files(self, step: int | None = None, *, together: bool = True) -> dict[str, bytes]:
        """Returns the contents of the files that were saved with a step, by name; empty if there were none.

        Args:
            step: the step to read; the latest by default.
            together: whether every process calls this. Otherwise this process reads alone, which also works before
                `jax.distributed.initialize`.

        Raises:
            FileNotFoundError: if there is no such step.
            DamagedCheckpoint: a `ValueError`, if a file or the manifest is missing or damaged.
            OSError: if a file cannot be read; with `together`, only after several attempts.
        """
        path = self._path(step, together=together)
        read = lambda: read_step_files(path, read_manifest(path))  # noqa: E731
        return read_together(read, path) if together else read()

    def verify(self, step: int | None = None) -> list[str]:
        """Reads every file of a step. Returns a line for each that is missing, has changed, or belongs to no step.

        Four small files have no checksum (`gtp_jax.checkpoint.WITHOUT_SUM`), because orbax writes them after the sums
        are computed. Nothing is restored from them; only their existence and their form are checked.

        Raises:
            FileNotFoundError: if there is no such step.
            OSError: if a file cannot be read.
        """
        return step_damage(self._path(step))

    def check_save(self) -> None:
        """Raises the error of the last save if it has failed by now in this process. Never waits for a save."""
        if self._manager is None:
            return
        if not self._manager.is_saving_in_progress():
            self.wait()
        elif self._failed and jax.process_count() > 1:  # the save ends only when the other processes have heard of it
            with self._failures():
                raise self._failed.pop()

    def wait(self) -> None:
        """Waits until the last save is committed, and raises its error if it failed."""
        if self._manager is not None:
            with self._failures():
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the last save and frees the threads. The object can be used again afterwards."""
        if self._manager is not None:
            manager, self._manager = self._manager, None
            with self._failures():
                manager.close()

    def _abandon(self) -> None:
        """Ends the background work of a failed save. The next save starts afresh."""
        manager, self._manager = self._manager, None
        if manager is None:
            return

        def close() -> None:
            for _ in range(2):  # the first call raises the background's error
                with contextlib.suppress(Exception):
                    manager.close()

        closing = threading.Thread(target=close, name="abandoned save", daemon=True)
        closing.start()
        closing.join(None if jax.process_count() == 1 else _PEERS_S)
        work_abandoned()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Explains a refused write. The next save starts afresh and removes the leftovers of this one."""
        try:
            yield
        except (OSError, ValueError) as error:
            work_abandoned()
            refused = refused_write(self._directory, error)
            if refused is None:
                raise
            self._manager = None
            raise refused from error

    def _check_guard(self) -> None:
        if jax.process_index() == 0:
            self._guard()

    def _path(self, step: int | None, *, together: bool = True) -> Any:
        step = None if step is None else whole_step(step)
        self.wait()
        return find_step(self._directory, step, together=together)

    def _checked(self, step: int) -> int:
        step = whole_step(step)
        if self._read_only:
            raise ValueError(f"the checkpoints in {self._directory} were opened with `read_only=True`; leave it out.")
        if step < 0:
            raise ValueError(f"`step` is {step}; it must be a whole number of at least 0.")
        if step > MOST:
            raise ValueError(f"`step` is {step}; it must be at most {MOST}.")
        return step
