"""Checksums of the files that hold a step's arrays, written as the step is."""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from .._foreign import parse_json, printable
from ._damage import DamagedCheckpoint
from ._file_sums import FileSums
from ._foreign_json import check_sums, read_file, strange_files
from ._pruning import COMMITTED
from ._quiet import work_abandoned
from ._streamed import StreamedArray, StreamHandler

SUMS = "sums.json"
_OWN = "sums.process_{}.json"
# The jax.monitoring event that records the seconds a save waits for sums after everything else is written.
SUMS_EVENT = "/gtp_jax/checkpoint/sums"
# Seconds between two looks at the files while a save is running.
_PAUSE = 0.1


class _Summed:
    """A handler of arrays that writes the size and the CRC-32 of every file beside them.

    Each process sums what it writes while it is written, in the background, from the memory that the system writes to
    disk; the first process adds what it merges at the end. So `sums.json` is there before the step appears under its
    name.

    Args:
        guard: called in the first process when all is written; raises if the step must not appear.
    """

    def __init__(self, guard: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._guard = guard

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        if _has_no_part(args, kwargs):  # which orbax 0.12.8 takes for an error
            return []  # and no sums: the directory is made in the background, and only writes wait for it
        writes = await super().async_save(directory, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return [_Summing(directory, writes or ())]

    def finalize(self, directory: epath.Path) -> None:
        super().finalize(directory)  # pyright: ignore[reportAttributeAccessIssue]
        sums: dict[str, Any] = {}
        for part in sorted(directory.glob(_OWN.format("*"))):
            sums.update(json.loads(part.read_text()))
            part.unlink()
        with _told(), FileSums(directory) as merged:
            sums.update(merged.finish(name for name in files(directory) if name not in sums))
        (directory / SUMS).write_text(sealed(sums))
        self._guard()


def _has_no_part(*saved: Any) -> bool:
    """Says whether this process stores nothing of the arrays, as it has none of the devices that do."""
    arrays = [x for x in jax.tree.leaves([_items(one) for one in saved]) if isinstance(x, jax.Array)]
    return bool(arrays) and not any(array.addressable_shards for array in arrays)


def _items(saved: Any) -> list[Any]:
    values = saved.values() if isinstance(saved, dict) else saved
    return [getattr(value, "item", None) for value in values]


class SummedArrays(_Summed, ocp.StandardCheckpointHandler):
    """orbax's handler of arrays in memory."""


class SummedStreams(_Summed, ocp.PyTreeCheckpointHandler):
    """orbax's handler of trees, for arrays that are made while they are written."""

    def __init__(self, guard: Callable[[], None]) -> None:
        handlers = (StreamedArray, StreamHandler()), (jax.Array, ocp.type_handlers.ArrayHandler())
        registry = ocp.type_handlers.create_type_handler_registry(*handlers)
        super().__init__(guard, type_handler_registry=registry)


class _Summing:
    """The writes of a process and the sums of its files, for orbax to wait for."""

    def __init__(self, directory: Any, writes: Sequence[Any]) -> None:
        self._directory = directory
        self._writes = writes

    def result(self, timeout: float | None = None) -> None:
        directory = created(self._directory)
        process = jax.process_index()
        own = f"ocdbt.process_{process}"

        def names() -> list[str]:
            return [f"{own}/{name}" for name in files(directory / own)]

        with FileSums(directory) as sums, ThreadPoolExecutor(1) as waiting:
            written = waiting.submit(lambda: [write.result(timeout) for write in self._writes])
            while wait([written], _PAUSE).not_done:
                sums.follow(names())
            written.result()
            with _told():
                finished = sums.finish(names())
        (directory / _OWN.format(process)).write_text(json.dumps(finished))


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Tells jax.monitoring of the seconds inside."""
    begin = time.perf_counter()
    yield
    jax.monitoring.record_event_duration_secs(SUMS_EVENT, time.perf_counter() - begin)


def created(directory: Any) -> epath.Path:
    """Returns the path of a directory that orbax may have only promised when a save began, and made since."""
    return epath.Path(getattr(directory, "path", directory))


def damage(directory: epath.Path) -> list[str]:
    """Returns what is wrong with the files of a step's arrays, a line each; none if all are as they were written.

    Raises:
        OSError: if a file is there and cannot be read, which proves no damage.
    """
    try:
        sums = unsealed(read_file(directory / SUMS))
        check_sums(sums)
    except (FileNotFoundError, NotADirectoryError):
        return [f"{directory / SUMS}: missing"]
    except ValueError as error:
        return [f"{directory / SUMS}: {error}"]
    if strange := strange_files(directory):
        return strange  # which must not be opened
    there = set(files(directory)) - {SUMS, COMMITTED}  # the mark is made after the sums
    with FileSums(directory) as again:
        now = again.finish(name for name in sums if name in there)
    lines = [f"{directory / printable(name)}: missing" for name in sums if name not in there]
    lines += [f"{directory / printable(name)}: not part of the checkpoint" for name in sorted(there - set(sums))]
    for name, (size, crc) in now.items():
        if size != sums[name][0]:
            lines.append(f"{directory / name}: {size} bytes, {sums[name][0]} were written")
        elif crc != sums[name][1]:
            lines.append(f"{directory / name}: changed since it was written")
    return lines


@contextlib.contextmanager
def naming_damage(directory: epath.Path) -> Iterator[None]:
    """Names the damaged files of a step's arrays if they cannot be read, whatever decoders make of their bytes.

    Raises:
        DamagedCheckpoint: if files are not as they were written; any other error is left as it is.
    """
    try:
        yield
    except Exception as error:
        work_abandoned()
        broken = damage(directory)
        if not broken:
            raise
        raise DamagedCheckpoint(directory.parent, broken) from error


def files(directory: epath.Path) -> list[str]:
    """Returns all files below a directory, by their paths in it; none if it is not there."""
    names: list[str] = []
    for path in directory.iterdir() if directory.exists() else ():
        names += [f"{path.name}/{name}" for name in files(path)] if path.is_dir() else [path.name]
    return names


def sealed(content: Any) -> str:
    """Returns JSON with a checksum of its own, in its last line."""
    text = json.dumps(content, indent=1)
    return f"{text}\n{zlib.crc32(text.encode()):08x}\n"


def unsealed(text: str) -> Any:
    """Returns the content of `sealed`.

    Raises:
        ValueError: if any of it has changed.
    """
    body, _, seal = text.removesuffix("\n").rpartition("\n")
    if f"{zlib.crc32(body.encode()):08x}" != seal:
        raise ValueError("changed since it was written")
    return parse_json(body.encode())
