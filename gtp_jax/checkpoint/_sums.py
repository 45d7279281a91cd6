"""Checksums of the files that hold a step's arrays, computed while the step is written."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from ._checksums import LAST_LINE, DamagedCheckpoint, differences, sealed, unsealed, waiting
from ._file_sums import FileSums
from ._foreign_json import check_sums, files_below, read_file, strange_files
from ._logical import LogicalArray, LogicalHandler
from ._pruning import COMMITTED
from ._quiet import work_abandoned
from ._streamed import StreamedArray, StreamHandler

SUMS = "sums.json"
_OWN = "sums.process_{}.json"
# The seconds between two checks of the files while a save is running.
_PAUSE = 0.1


class _Summed:
    """A handler of arrays that also writes the size and the CRC-32 of every file of arrays.

    Each process sums its files in the background while it writes them, from the page cache. The first process adds the
    sums of the files that it merges at the end. So `sums.json` exists before the step appears under its name.

    Args:
        guard: called in the first process when everything is written; raises if the step must not appear.
        failed: called with the error if this process cannot write its files.
    """

    def __init__(self, guard: Callable[[], None], failed: Callable[[Exception], None], **options: Any) -> None:
        super().__init__(**options)
        self._guard, self._failed = guard, failed

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        if _has_no_part(args, kwargs):  # orbax 0.12.8 treats this as an error
            return []  # no sums either: the directory is created in the background, and only writes wait for it
        writes = await super().async_save(directory, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return [_Summing(directory, writes or (), self._failed)]

    def finalize(self, directory: epath.Path) -> None:
        super().finalize(directory)  # pyright: ignore[reportAttributeAccessIssue]
        sums: dict[str, Any] = {}
        for part in sorted(directory.glob(_OWN.format("*"))):
            sums.update(json.loads(part.read_text()))
            part.unlink()
        with waiting(), FileSums(directory) as merged:
            sums.update(merged.finish(name for name in files_below(directory) if name not in sums))
        (directory / SUMS).write_text(sealed(json.dumps(sums, indent=1), LAST_LINE))
        self._guard()


def _has_no_part(*saved: Any) -> bool:
    """Returns whether this process stores no part of the arrays, because none of its devices does."""
    leaves = [x.array if isinstance(x, LogicalArray) else x for x in jax.tree.leaves([_items(one) for one in saved])]
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    return bool(arrays) and not any(array.addressable_shards for array in arrays)


def _items(saved: Any) -> list[Any]:
    values = saved.values() if isinstance(saved, dict) else saved
    return [getattr(value, "item", None) for value in values]


class SummedArrays(_Summed, ocp.StandardCheckpointHandler):
    """orbax's handler of arrays in memory, with sums."""


class SummedStreams(_Summed, ocp.PyTreeCheckpointHandler):
    """orbax's handler of trees, with sums, for arrays that are padded in memory or computed while they are written."""

    def __init__(self, guard: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        registry = ocp.type_handlers.create_type_handler_registry(
            (StreamedArray, StreamHandler()),
            (LogicalArray, LogicalHandler()),
            # no file of shardings: orbax could not read one that lacks the arrays of the other handlers
            (jax.Array, ocp.type_handlers.ArrayHandler(enable_write_sharding_file=False)),
        )
        super().__init__(guard, failed, type_handler_registry=registry)


class _Summing:
    """The writes of a process and the sums of its files; orbax waits for `result`."""

    def __init__(self, directory: Any, writes: Sequence[Any], failed: Callable[[Exception], None]) -> None:
        self._directory = directory
        self._writes = writes
        self._failed = failed

    def result(self, timeout: float | None = None) -> None:
        try:
            self._write(timeout)
        except Exception as error:  # orbax raises it once all processes have met, which may be minutes later
            self._failed(error)
            raise

    def _write(self, timeout: float | None) -> None:
        directory = created(self._directory)
        process = jax.process_index()
        own = f"ocdbt.process_{process}"

        def names() -> list[str]:
            return [f"{own}/{name}" for name in files_below(directory / own)]

        with FileSums(directory) as sums, ThreadPoolExecutor(1) as background:
            written = background.submit(lambda: [write.result(timeout) for write in self._writes])
            while wait([written], _PAUSE).not_done:
                sums.follow(names())
            written.result()
            with waiting():
                finished = sums.finish(names())
        (directory / _OWN.format(process)).write_text(json.dumps(finished))


def created(directory: Any) -> epath.Path:
    """Returns the path of a directory that orbax may have created only after the save began."""
    return epath.Path(getattr(directory, "path", directory))


def arrays_damage(directory: epath.Path) -> list[str]:
    """Returns one line for each file of a step's arrays that is missing, has changed, or is not part of the checkpoint.

    Raises:
        OSError: if a file exists and cannot be read, which does not prove damage.
    """
    try:
        sums = unsealed(read_file(directory / SUMS), LAST_LINE)
        check_sums(sums)
    except (FileNotFoundError, NotADirectoryError):
        return [f"{directory / SUMS}: missing"]
    except ValueError as error:
        return [f"{directory / SUMS}: {error}"]
    if strange := strange_files(directory):
        return strange  # these must not be opened
    there = set(files_below(directory)) - {SUMS, COMMITTED}  # the mark is written after the sums
    with FileSums(directory) as again:
        found = again.finish(there & sums.keys())
    return differences(sums, dict.fromkeys(sorted(there), []) | found, f"{directory}/")


@contextlib.contextmanager
def naming_damage(directory: epath.Path) -> Iterator[None]:
    """Checks the files of a step's arrays if reading them fails, and raises an error that names the damaged ones.

    Raises:
        DamagedCheckpoint: if files are missing or have changed since they were written, whatever error a decoder
            raised. Without damage, the original error is raised.
    """
    try:
        yield
    except Exception as error:
        work_abandoned()
        broken = arrays_damage(directory)
        if not broken:
            raise
        raise DamagedCheckpoint(directory.parent, broken) from error
