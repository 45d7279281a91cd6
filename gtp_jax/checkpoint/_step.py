"""The directory of one step: how orbax writes and reads it, and what is said when it is damaged."""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import orbax.checkpoint as ocp

from ._foreign_json import read_file, strange_files
from ._leaf import Leaf
from ._manifest import read
from ._pruning import Pruning
from ._quiet import work_abandoned
from ._steps import steps_in
from ._streamed import StreamedArray
from ._sums import SummedArrays, SummedStreams, created, damage

# Its two parts.
ARRAYS, _MANIFEST = "arrays", "manifest"
_MANIFEST_FILE = "manifest.json"

_SHOWN = 8

# Host memory for what is on its way to the devices, if no device's part of an array is larger. Orbax's own limit is 96.
_ON_THE_WAY_GB = 16


def new_manager(directory: str, preservation: Any, *, background: bool = True) -> ocp.CheckpointManager:
    """Returns what writes steps. Makes the directory, and sweeps steps that look half-written.

    Args:
        directory: of all steps.
        preservation: orbax's policy of which steps to keep.
        background: whether it writes while the caller goes on.
    """
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(ARRAYS, ocp.args.StandardSave, SummedArrays())
    registry.add(ARRAYS, ocp.args.PyTreeSave, SummedStreams())
    registry.add(_MANIFEST, ocp.args.JsonSave, _Manifests())
    options = ocp.CheckpointManagerOptions(
        preservation_policy=preservation,
        cleanup_tmp_directories=True,
        save_root_metadata=False,
        enable_async_checkpointing=background,
    )
    manager = ocp.CheckpointManager(directory, options=options, handler_registry=registry)
    manager._checkpoint_deleter = Pruning(directory)  # it takes no other by its options
    return manager


def write_step(
    manager: ocp.CheckpointManager, step: int, arrays: Mapping[str, Any], description: Future[dict[str, Any]]
) -> None:
    """Writes a step: arrays by name, all in memory or all streamed, and their manifest.

    Args:
        manager: of `new_manager`.
        step: above the latest one.
        arrays: by name.
        description: the manifest, which may come later: the step is not committed before. If it never comes but an
            error does, that is the save's.

    Raises:
        ValueError: if the step is not above the latest one.
    """
    latest = manager.latest_step()
    if latest is not None and step <= latest:
        raise ValueError(
            f"`step` is {step}, but {manager.directory} already has step {latest}; steps must ascend. Resume from "
            "it, or save to another directory."
        )
    tree = _nested({_keys(name): array for name, array in arrays.items()})
    if any(isinstance(array, StreamedArray) for array in arrays.values()):
        save: Any = ocp.args.PyTreeSave(tree)
    else:
        # A stack of matrices lies on disk by the matrix, so that a reader of one need not read them all.
        chunks = jax.tree.map(lambda array: ocp.SaveArgs(shard_axes=(0,) if array.ndim > 2 else ()), tree)
        save = ocp.args.StandardSave(tree, save_args=chunks)
    promised: Any = description
    items = {ARRAYS: save, _MANIFEST: ocp.args.JsonSave(promised)}
    manager.save(step, args=ocp.args.Composite(**items), force=True)


class _Manifests(ocp.JsonCheckpointHandler):
    """Writes a manifest that is made while the arrays are written already."""

    async def async_save(self, directory: Any, item: Any = None, args: Any = None) -> Any:
        del item
        return [_Promised(directory, args.item)]


class _Promised:
    """A manifest to come, for orbax to wait for."""

    def __init__(self, directory: Any, description: Future[dict[str, Any]]) -> None:
        self._directory = directory
        self._description = description

    def result(self, timeout: float | None = None) -> None:
        content = self._description.result(timeout)
        if jax.process_index() == 0:
            (created(self._directory) / _MANIFEST_FILE).write_text(json.dumps(content))


def read_arrays(path: Any, leaves: Sequence[Leaf], *, partial: bool) -> list[jax.Array]:
    """Reads arrays as they are on disk.

    Args:
        path: of the step's directory.
        leaves: those to read.
        partial: whether there are others.

    Raises:
        ValueError: if files are damaged.
    """
    if not any(leaf.array.sharding.addressable_devices for leaf in leaves):
        return _read_nothing(path, leaves)
    target = _nested({_keys(leaf.name): leaf.stored() for leaf in leaves})
    restore_args = jax.tree.map(
        lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype), target
    )
    try:
        limit = max(_ON_THE_WAY_GB, _largest_part(path, leaves) // 10**9 + 1)  # orbax refuses a part that is larger
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit)) as reader:
            arrays = reader.restore(
                path / ARRAYS, args=ocp.args.PyTreeRestore(target, restore_args, partial_restore=partial)
            )
    except Exception as error:  # whatever the decoders below make of damaged bytes
        work_abandoned()
        broken = damage(path / ARRAYS)
        if not broken:
            raise
        raise ValueError(damaged(path, broken)) from error
    return [functools.reduce(operator.getitem, _keys(leaf.name), arrays) for leaf in leaves]


def _read_nothing(path: Any, leaves: Sequence[Leaf]) -> list[jax.Array]:
    """Returns arrays of which this process has no part, as it has none of their devices.

    It reads the smallest one, as orbax waits for every process to read, and refuses to make an array without a part.
    """
    shapes = [leaf.stored() for leaf in leaves]
    least = min(range(len(leaves)), key=lambda i: math.prod(shapes[i].shape))
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shape, dtype = shapes[least].shape, shapes[least].dtype
    read_arrays(path, [Leaf(leaves[least].path, jax.ShapeDtypeStruct(shape, dtype, sharding=here))], partial=True)
    return [jax.make_array_from_single_device_arrays(x.shape, x.sharding, [], dtype=x.dtype) for x in shapes]


def _largest_part(path: Any, leaves: Sequence[Leaf]) -> int:
    """Returns the bytes of the largest device's part of an array, in whole chunks of those on disk, as they are
    read."""
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
        ValueError: if it is missing or damaged.
    """
    file = path / _MANIFEST / _MANIFEST_FILE
    try:
        return read(read_file(file))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise ValueError(
            f"{path} has no {_MANIFEST_FILE}: it was not written by gtp_jax, or has been deleted in part. "
            "Choose another step or directory."
        ) from error
    except ValueError as error:
        raise ValueError(damaged(path, [f"{file}: {error}"])) from error


def check_files(path: Any) -> None:
    """Refuses a step of which a file is a link, a FIFO or a device: no such file is opened.

    Raises:
        ValueError: naming the first few.
    """
    if lines := strange_files(path / ARRAYS):
        raise ValueError(damaged(path, lines))


def loss_of(directory: str, step: int) -> float:
    """Returns the loss of a step in a directory; NaN if it has none, or no readable manifest."""
    try:
        loss = read_manifest(steps_in(directory)[step])["loss"]
    except (KeyError, ValueError):
        return math.nan
    return math.nan if loss is None else loss


def damaged(path: Any, lines: Sequence[str]) -> str:
    """Returns what to tell about a step's directory of which this is damaged."""
    shown = "\n".join(f"  {line}" for line in lines[:_SHOWN])
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return (
        f"the checkpoint {path} is damaged:\n{shown}{more}\nRestore another step; `gtp-jax checkpoint verify "
        f"{path.parent}` says which are whole."
    )


def _keys(name: str) -> tuple[str, ...]:
    """Returns where an array is on disk; a slash within a key of the state counts as one between two."""
    return tuple(name.split("/"))


def _nested(items: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in items.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree
