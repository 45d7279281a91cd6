"""Checks whether a step is intact: every file in its directory, and that its arrays were saved with its manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ._damage import DamagedCheckpoint
from ._foreign_json import read_file, strange_files
from ._manifest import FILES, SAVE
from ._pruning import COMMITTED
from ._side_files import FOLDER, files_damage
from ._step import ARRAYS, MANIFEST, MANIFEST_FILE, check_files, read_manifest
from ._sums import damage, files

# orbax's files that describe the arrays and the step.
_METADATA, _STEP_METADATA = "_METADATA", "_CHECKPOINT_METADATA"
# Files that nothing is restored from, and that orbax writes after the sums are computed. It always writes them, so a
# missing one has been deleted. Otherwise only the form of their content is checked.
WITHOUT_SUM = (_STEP_METADATA, COMMITTED, f"{ARRAYS}/{COMMITTED}", f"{MANIFEST}/{COMMITTED}")
_BESIDE = f"{MANIFEST}/{FOLDER}"
_MARK = b"Checkpoint commit was successful"


def step_damage(path: Any) -> list[str]:
    """Returns one line for each file of a step that is missing, has changed, or is not part of the checkpoint.

    Reads every file. For the files in `WITHOUT_SUM`, only their existence and their form are checked.

    Raises:
        OSError: if a file exists and cannot be read.
    """
    if strange := strange_files(path):
        return strange  # these must not be opened
    lines, content = damage(path / ARRAYS), None
    try:
        content = read_manifest(path)
        if not lines:
            check_bound(path, content)
    except DamagedCheckpoint as error:
        lines += error.lines
    described = None if content is None else content.get(FILES, {})
    lines += files_damage(path / _BESIDE, described or {})
    there = set(files(path))
    lines += [f"{path / name}: missing" for name in WITHOUT_SUM if name not in there]
    for name in sorted(there):
        folder, _, file = name.rpartition("/")
        if name in WITHOUT_SUM:
            if not _is_orbax(name, (path / name).read_bytes()):
                lines.append(f"{path / name}: changed since it was written")
        elif folder == _BESIDE and (described is None or file in described):
            continue  # checked above, or cannot be checked because the manifest is unreadable
        elif name != f"{MANIFEST}/{MANIFEST_FILE}" and not name.startswith(f"{ARRAYS}/"):
            lines.append(f"{path / name}: not part of the checkpoint")
    return lines


def _is_orbax(name: str, content: bytes) -> bool:
    """Returns whether a file has the form in which orbax writes it."""
    if name.endswith(COMMITTED):
        return content.startswith(_MARK) or not content
    try:
        items = json.loads(content)["item_handlers"]
        return set(items) == {ARRAYS, MANIFEST}
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def check_bound(path: Any, content: Mapping[str, Any]) -> None:
    """Checks that the arrays in a step's directory were saved with its manifest.

    Args:
        path: the path of the step's directory.
        content: the manifest.

    Raises:
        DamagedCheckpoint: if the arrays belong to another step, if orbax's description of them is missing or damaged,
            or if the step contains a link, a FIFO or a device.
        OSError: if that description cannot be read.
    """
    check_files(path)
    file = path / ARRAYS / _METADATA
    try:
        theirs = (json.loads(read_file(file)).get("custom_metadata") or {}).get(SAVE)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpoint(path, [f"{file}: missing"]) from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(path, [f"{file}: changed since it was written"]) from error
    if theirs != content[SAVE]:
        raise DamagedCheckpoint(path, [f"{path / ARRAYS}: not the arrays that were saved with this manifest"])
