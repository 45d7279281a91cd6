"""Writes and reads the directory of one step with orbax."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from ..mesh import have_equally_many_devices, of_all_processes
from ._checksums import DamagedCheckpoint
from ._foreign_json import read_file, strange_files
from ._leaf import Leaf
from ._logical import LogicalArray
from ._manifest import FILES, SAVE, read
from ._pruning import Pruning
from ._side_files import FOLDER, read_files, write_files
from ._steps import steps_in
from ._streamed import StreamedArray
from ._sums import SummedArrays, SummedStreams, created, naming_damage

# The two items of a step's directory.
ARRAYS, MANIFEST = "arrays", "manifest"
MANIFEST_FILE = "manifest.json"

# The limit in GB on host memory for arrays in transit to the devices; increased if one device's part of an array is
# larger. Orbax's default is 96.
_ON_THE_WAY_GB = 16


def new_manager(
    directory: str,
    preservation: Any,
    *,
    guard: Callable[[], None],
    failed: Callable[[Exception], None] = lambda error: None,
    background: bool = True,
) -> ocp.CheckpointManager:
    """Returns the manager that writes steps. Creates the directory, and deletes steps that look half-written.

    Args:
        directory: the directory of all steps.
        preservation: orbax's policy that decides which steps to keep.
        guard: called in the first process before a step is published or deleted; raises to prevent it.
        failed: called in the background with the error if this process cannot write its part of a step.
        background: whether to write in the background while the caller continues.
    """
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(ARRAYS, ocp.args.StandardSave, SummedArrays(guard, failed))
    registry.add(ARRAYS, ocp.args.PyTreeSave, SummedStreams(guard, failed))
    registry.add(MANIFEST, ocp.args.JsonSave, _Manifests())
    together = _processes(epath.Path(directory).name)
    if together.active_processes is not None:  # orbax does not create the directory in this case
        if jax.process_index() == 0:
            epath.Path(directory).mkdir(parents=True, exist_ok=True)
        of_all_processes(np.int32(0))
    options = ocp.CheckpointManagerOptions(
        preservation_policy=preservation,
        create=together.active_processes is None,
        multiprocessing_options=together,
        cleanup_tmp_directories=True,
        save_root_metadata=False,
        enable_async_checkpointing=background,
    )
    manager = ocp.CheckpointManager(directory, options=options, handler_registry=registry)
    manager._checkpoint_deleter = Pruning(directory, guard)  # there is no option for this
    return manager


def _processes(name: str) -> ocp.options.MultiprocessingOptions:
    """Returns the options by which processes wait for each other while they save.

    By default orbax calls `sync_global_devices`, which fails if processes have different numbers of devices. If the
    active processes are listed, it uses barriers of JAX's coordination service instead.

    Args:
        name: begins the names of the manager's barriers. Two managers that save in the background at the same time, as
            those of checkpoints and of snapshots may, fail if their barriers have the same names.
    """
    active = None if have_equally_many_devices() else set(range(jax.process_count()))
    return ocp.options.MultiprocessingOptions(active_processes=active, barrier_sync_key_prefix=name)


def write_step(
    manager: ocp.CheckpointManager,
    step: int,
    arrays: Mapping[str, Any],
    description: Future[str],
    save: str,
    files: Mapping[str, bytes],
) -> None:
    """Writes a step: its arrays, its manifest, and its files.

    Args:
        manager: the manager that `new_manager` returned.
        step: the number of the step, greater than the latest one.
        arrays: the arrays by name, either all in memory or all streamed.
        description: the manifest's text, which may be set later; the step is not committed until then. If the future is
            set to an error, the save fails with that error.
        save: the manifest's random number, which is also written with the arrays.
        files: the contents of the files by name; the manifest has their checksums.

    Raises:
        ValueError: if the step is not greater than the latest one.
    """
    latest = manager.latest_step()
    if latest is not None and step <= latest:
        raise ValueError(
            f"`step` is {step}, but {manager.directory} already has step {latest}; steps must ascend. Resume from "
            "it, or save to another directory."
        )
    tree = _nested({_keys(name): array for name, array in arrays.items()})
    if any(isinstance(array, StreamedArray) for array in arrays.values()):
        written: Any = ocp.args.PyTreeSave(tree, custom_metadata={SAVE: save})
    else:
        # A stack of matrices is stored in chunks of one matrix, so that reading one does not read them all.
        chunks = jax.tree.map(lambda array: ocp.SaveArgs(shard_axes=(0,) if array.ndim > 2 else ()), tree)
        padded = any(isinstance(array, LogicalArray) for array in arrays.values())
        kind = ocp.args.PyTreeSave if padded else ocp.args.StandardSave
        written = kind(tree, save_args=chunks, custom_metadata={SAVE: save})
    promised: Any = _Promise(description, files)
    items = {ARRAYS: written, MANIFEST: ocp.args.JsonSave(promised)}
    manager.save(step, args=ocp.args.Composite(**items), force=True)


@dataclasses.dataclass(frozen=True)
class _Promise:
    """A manifest that is not available yet, and the files stored with it."""

    description: Future[str]
    files: Mapping[str, bytes]


class _Manifests(ocp.JsonCheckpointHandler):
    """Writes a manifest that becomes available while the arrays are already being written."""

    async def async_save(self, directory: Any, item: Any = None, args: Any = None) -> Any:
        del item
        return [_Promised(directory, args.item)]


class _Promised:
    """Writes a manifest when it becomes available; orbax waits for `result`."""

    def __init__(self, directory: Any, promise: _Promise) -> None:
        self._directory, self._promise = directory, promise

    def result(self, timeout: float | None = None) -> None:
        content = self._promise.description.result(timeout)
        if jax.process_index() == 0:
            directory = created(self._directory)
            write_files(directory / FOLDER, self._promise.files)
            (directory / MANIFEST_FILE).write_text(content)


def read_arrays(path: Any, leaves: Sequence[Leaf], *, partial: bool) -> list[jax.Array]:
    """Returns arrays as they are on disk.

    Args:
        path: the path of the step's directory.
        leaves: the arrays to read.
        partial: whether the step has other arrays as well.

    Raises:
        DamagedCheckpoint: if files are missing or have changed since they were written.
        OSError: if files cannot be read.
    """
    if not any(leaf.array.sharding.addressable_devices for leaf in leaves):
        shapes = [leaf.stored() for leaf in leaves]
        return [jax.make_array_from_single_device_arrays(x.shape, x.sharding, [], dtype=x.dtype) for x in shapes]
    target = _nested({_keys(leaf.name): leaf.stored() for leaf in leaves})
    restore_args = _nested({_keys(leaf.name): _restore_args(leaf) for leaf in leaves})
    with naming_damage(path / ARRAYS):
        limit = max(_ON_THE_WAY_GB, _largest_part(path, leaves) // 10**9 + 1)  # orbax refuses larger parts
        # A Checkpointer would make processes wait for each other, although one of them may find damage and raise.
        with contextlib.closing(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit)) as reader:
            arrays = reader.restore(
                path / ARRAYS, args=ocp.args.PyTreeRestore(target, restore_args, partial_restore=partial)
            )
    return [functools.reduce(operator.getitem, _keys(leaf.name), arrays) for leaf in leaves]


def _restore_args(leaf: Leaf) -> ocp.ArrayRestoreArgs:
    like = leaf.stored()
    # orbax fills a larger array with zeros, which are the padding, unless it is to be strict
    return ocp.ArrayRestoreArgs(
        sharding=like.sharding, global_shape=like.shape, dtype=like.dtype, strict=leaf.logical is None
    )


def _largest_part(path: Any, leaves: Sequence[Leaf]) -> int:
    """Returns the size in bytes of the largest part of an array that one device needs, rounded up to the whole chunks
    that are read from disk."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        metadata = reader.metadata(path / ARRAYS).item_metadata.tree  # pyright: ignore[reportOptionalMemberAccess]
    largest = 0
    for leaf in leaves:
        like, kept = leaf.stored(), functools.reduce(operator.getitem, _keys(leaf.name), metadata)
        part = like.shape if like.sharding is None else like.sharding.shard_shape(like.shape)
        chunks = kept.storage.chunk_shape or like.shape
        # a part may begin within a chunk
        read = (min(-(-n // c), -(-k // c) + 1) * c for n, k, c in zip(like.shape, part, chunks, strict=True))
        largest = max(largest, math.prod(read) * like.dtype.itemsize)
    return largest


def read_manifest(path: Any) -> dict[str, Any]:
    """Returns the manifest of a step's directory.

    Raises:
        DamagedCheckpoint: if the manifest is missing, damaged, or of another step.
        OSError: if the manifest cannot be read.
    """
    file = path / MANIFEST / MANIFEST_FILE
    try:
        content = read(read_file(file))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        line = f"{path} has no {MANIFEST_FILE}: it was not written by gtp_jax, or has been partly deleted"
        raise DamagedCheckpoint(path, [line]) from error
    except ValueError as error:
        raise DamagedCheckpoint(path, [f"{file}: {error}"]) from error
    if str(content["step"]) != path.name:
        line = f"{file}: of step {content['step']}; the directory has been renamed, or its files were replaced"
        raise DamagedCheckpoint(path, [line])
    return content


def read_step_files(path: Any, content: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the contents of the files stored with a step's arrays, by name.

    Args:
        path: the step's directory.
        content: the manifest.

    Raises:
        DamagedCheckpoint: if a file is missing or has changed.
        OSError: if a file cannot be read.
    """
    check_files(path)
    return read_files(path, path / MANIFEST / FOLDER, content.get(FILES, {}))


def check_files(path: Any) -> None:
    """Refuses a step that contains a link, a FIFO or a device; none of them is opened.

    Raises:
        DamagedCheckpoint: if there are such files; names the first few.
    """
    if lines := strange_files(path):
        raise DamagedCheckpoint(path, lines)


def loss_of(directory: str, step: int) -> float:
    """Returns the loss of a step in a directory; NaN if it has no loss or no readable manifest."""
    try:
        loss = read_manifest(steps_in(directory)[step])["loss"]
    except (KeyError, ValueError, OSError):
        return math.nan
    return math.nan if loss is None else loss


def _keys(name: str) -> tuple[str, ...]:
    """Returns the keys of an array on disk; a slash within a key of the state separates two keys there."""
    return tuple(name.split("/"))


def _nested(items: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in items.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree
