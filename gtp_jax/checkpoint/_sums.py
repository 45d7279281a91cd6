"""Checksums of the files that hold a step's arrays, written as the step is."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from ._crc import joined
from ._pruning import COMMITTED
from ._streamed import StreamedArray, StreamHandler

SUMS = "sums.json"
_OWN = "sums.process_{}.json"
# What jax.monitoring is told the seconds of.
SUMS_EVENT = "/gtp_jax/checkpoint/sums"
_PART_BYTES = 1 << 24
_BUFFER_BYTES = 1 << 18
_THREADS = 16


class _Summed:
    """A handler of arrays that writes the size and the CRC-32 of every file beside them.

    Each process sums what it has written as soon as it is on disk, in the background; the first process adds what it
    merges at the end. So `sums.json` is there before the step appears under its name.
    """

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        writes = await super().async_save(directory, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return [*(writes or ()), _Summing(directory, writes or ())]

    def finalize(self, directory: epath.Path) -> None:
        super().finalize(directory)  # pyright: ignore[reportAttributeAccessIssue]
        sums: dict[str, Any] = {}
        for part in sorted(directory.glob(_OWN.format("*"))):
            sums.update(json.loads(part.read_text()))
            part.unlink()
        sums.update(_sum(directory, (name for name in files(directory) if name not in sums)))
        (directory / SUMS).write_text(sealed(sums))


class SummedArrays(_Summed, ocp.StandardCheckpointHandler):
    """orbax's handler of arrays in memory."""


class SummedStreams(_Summed, ocp.PyTreeCheckpointHandler):
    """orbax's handler of trees, for arrays that are made while they are written."""

    def __init__(self) -> None:
        handlers = (StreamedArray, StreamHandler()), (jax.Array, ocp.type_handlers.ArrayHandler())
        registry = ocp.type_handlers.create_type_handler_registry(*handlers)
        super().__init__(type_handler_registry=registry)


class _Summing:
    """The sum of a process' own files, for orbax to wait for after the writes."""

    def __init__(self, directory: Any, writes: Iterable[Any]) -> None:
        self._directory = directory
        self._writes = writes

    def result(self, timeout: float | None = None) -> None:
        for write in self._writes:
            write.result(timeout)
        directory = epath.Path(getattr(self._directory, "path", self._directory))
        process = jax.process_index()
        own = (name for name in files(directory) if name.startswith(f"ocdbt.process_{process}/"))
        (directory / _OWN.format(process)).write_text(json.dumps(_sum(directory, own)))


def damage(directory: epath.Path) -> list[str]:
    """What is wrong with the files of a step's arrays, a line each; none if all are as they were written."""
    try:
        sums = unsealed((directory / SUMS).read_bytes().decode(errors="replace"))
    except (OSError, ValueError) as error:
        return [f"{directory / SUMS}: {error}"]
    there = set(files(directory)) - {SUMS, COMMITTED}  # the mark is made after the sums
    found = _sum(directory, (name for name in sums if name in there))
    lines = [f"{directory / name}: missing" for name in sums if name not in there]
    lines += [f"{directory / name}: not part of the checkpoint" for name in sorted(there - set(sums))]
    for name, (size, crc) in found.items():
        if size != sums[name][0]:
            lines.append(f"{directory / name}: {size} bytes, {sums[name][0]} were written")
        elif crc != sums[name][1]:
            lines.append(f"{directory / name}: changed since it was written")
    return lines


def files(directory: epath.Path) -> list[str]:
    """All files below a directory, by their paths in it."""
    found: list[str] = []
    for path in directory.iterdir():
        found += [f"{path.name}/{name}" for name in files(path)] if path.is_dir() else [path.name]
    return found


def sealed(content: Any) -> str:
    """JSON with a checksum of its own, in its last line."""
    text = json.dumps(content, indent=1)
    return f"{text}\n{zlib.crc32(text.encode()):08x}\n"


def unsealed(text: str) -> Any:
    """The content of `sealed`.

    Raises:
        ValueError: if any of it has changed.
    """
    body, _, seal = text.removesuffix("\n").rpartition("\n")
    if f"{zlib.crc32(body.encode()):08x}" != seal:
        raise ValueError("changed since it was written")
    return json.loads(body)


def _sum(directory: epath.Path, names: Iterable[str]) -> dict[str, list[int]]:
    """Size and CRC-32 of files, read in parts by several threads: data are in few files, and large ones."""
    begin = time.perf_counter()
    sizes = {name: (directory / name).stat().length for name in names}
    parts = [(name, start) for name, size in sizes.items() for start in range(0, size, _PART_BYTES)]
    with ThreadPoolExecutor(_THREADS) as pool:
        crcs = pool.map(lambda part: _sum_part(directory / part[0], part[1]), parts)
        found = {name: [size, 0] for name, size in sizes.items()}
        for (name, start), crc in zip(parts, crcs, strict=True):
            found[name][1] = joined(found[name][1], crc, min(_PART_BYTES, sizes[name] - start))
    jax.monitoring.record_event_duration_secs(SUMS_EVENT, time.perf_counter() - begin)
    return found


def _sum_part(path: epath.Path, begin: int) -> int:
    # Through a buffer that stays in a core's cache, twice as fast as reading the part at once.
    crc, left, buffer = 0, _PART_BYTES, memoryview(bytearray(_BUFFER_BYTES))
    with path.open("rb") as opened:
        file: Any = opened
        file.seek(begin)
        while left and (size := file.readinto(buffer[: min(left, _BUFFER_BYTES)])):
            crc, left = zlib.crc32(buffer[:size], crc), left - size
    return crc
