"""Compares what a step holds with the checksums that were recorded when it was saved, and names what differs.

Everything that is restored has a checksum. An array and a file have different ones, because neither kind finds all that
the other does:

- An array has a digest of its values (`_digest.py`), which the manifest records. It depends neither on the mesh nor on
  how the array is stored, so the devices compute it, before a save and after a restore. It finds what went wrong in
  memory, in a transfer or in a decoder, and copies of an array that differ. It says nothing of a file that no value
  depends on, and cannot be compared if a file cannot be decoded.
- A file has its size and a checksum of its bytes: `sums.json` records those of the arrays' files (`_sums.py`), the
  manifest those of the files stored with them (`_side_files.py`). Comparing them takes no decoder and no device. It
  finds every byte that has changed on disk, names the file, and proves that a failed read is due to damage. It knows
  nothing of what happened before the bytes were written.

The two JSON files that record checksums end with a checksum of themselves.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from .._foreign import parse_json, printable

# The `jax.monitoring` event that records the seconds that a save or a restore waits for checksums.
CHECKSUM_EVENT = "/gtp_jax/checkpoint/checksums"
# How a JSON text ends with its checksum: what the text ends with without it, and with it. The checksum is the last key
# of an object, or the last line.
LAST_KEY, LAST_LINE = ("}", ', "crc32": "{}"}}'), ("", "\n{}\n")
CHANGED = "changed since it was written"

_SHOWN = 8


class DamagedCheckpoint(ValueError):
    """Files of a step are missing or have changed since they were written, or its arrays have other values than those
    saved.

    Args:
        path: the path of the step's directory.
        lines: one line for each damaged file or array.
    """

    def __init__(self, path: Any, lines: Sequence[str]) -> None:
        shown = "\n".join(f"  {line}" for line in lines[:_SHOWN])
        more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        super().__init__(
            f"the checkpoint {path} is damaged:\n{shown}{more}\nRestore another step; `gtp-jax checkpoint verify "
            f"{path.parent}` shows which are intact."
        )
        self.lines = tuple(lines)


def differences(recorded: Mapping[str, Any], found: Mapping[str, Any], where: str = "") -> list[str]:
    """Returns one line for each array or file that is missing, has changed, or is not part of the checkpoint.

    Args:
        recorded: what the step records, by name: the digest of an array, or the size and the checksum of a file.
        found: the same of what is there.
        where: what precedes the names in the lines.
    """
    lines = []
    for name in {**recorded, **found}:
        was, now = recorded.get(name), found.get(name)
        if was == now:
            continue
        if now is None:
            said = "missing"
        elif was is None:
            said = "not part of the checkpoint"
        elif isinstance(was, str):
            said = "values differ from those saved"
        else:
            said = CHANGED if was[0] == now[0] else f"{now[0]} bytes, {was[0]} were written"
        lines.append(f"{where}{printable(name)}: {said}")
    return lines


def sealed(text: str, seal: tuple[str, str]) -> str:
    """Returns a JSON text with its checksum, in the form of `LAST_KEY` or of `LAST_LINE`."""
    end, form = seal
    return text.removesuffix(end) + form.format(f"{zlib.crc32(text.encode()):08x}")


def unsealed(text: str, seal: tuple[str, str]) -> Any:
    """Returns the content of a text that `sealed` returned.

    Raises:
        ValueError: if the text has changed.
    """
    end, form = seal
    body = text[: -len(form.format("0" * 8))] + end
    if sealed(body, seal) != text:
        raise ValueError(CHANGED)
    return parse_json(body.encode())


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Records the seconds spent inside as `CHECKSUM_EVENT`."""
    begin = time.perf_counter()
    yield
    jax.monitoring.record_event_duration_secs(CHECKSUM_EVENT, time.perf_counter() - begin)
