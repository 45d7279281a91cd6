"""Checks whether a step is intact: every file in its directory, and that its arrays were saved with its manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ._checksums import CHANGED, DamagedCheckpoint, differences
from ._foreign_json import files_below, read_file, strange_files
from ._manifest import FILES, SAVE
from ._pruning import COMMITTED
from ._side_files import FOLDER, files_damage
from ._step import ARRAYS, MANIFEST, MANIFEST_FILE, check_files, read_manifest
from ._sums import arrays_damage

# orbax's files that describe the arrays and the step.
_METADATA, _STEP_METADATA = "_METADATA", "_CHECKPOINT_METADATA"
# Files that nothing is restored from, and that orbax writes after the sums are computed. It always writes them, so a
# missing one has been deleted. Otherwise only the form of their content is checked.
WITHOUT_SUM = (_STEP_METADATA, COMMITTED, f"{ARRAYS}/{COMMITTED}", f"{MANIFEST}/{COMMITTED}")
_MARK = b"Checkpoint commit was successful"


def step_damage(path: Any) -> list[str]:
    """Returns one line for each file of a step that is missing, has changed, or is not part of the checkpoint.

    Reads every file. For the files in `WITHOUT_SUM`, only their existence and their form are checked.

    Raises:
        OSError: if a file exists and cannot be read.
    """
    if strange := strange_files(path):
        return strange  # these must not be opened
    lines = arrays_damage(path / ARRAYS)
    intact = not lines
    try:
        content = read_manifest(path)
        lines += files_damage(path / MANIFEST / FOLDER, content.get(FILES, {}))
        if intact:
            check_bound(path, content)
    except DamagedCheckpoint as error:
        lines += error.lines
    elsewhere = (f"{ARRAYS}/", f"{MANIFEST}/{FOLDER}/")
    found = {
        name: (None, name in WITHOUT_SUM and _is_orbax(name, (path / name).read_bytes()))
        for name in sorted({*files_below(path)} - {f"{MANIFEST}/{MANIFEST_FILE}"})
        if name in WITHOUT_SUM or not name.startswith(elsewhere)
    }
    return lines + differences(dict.fromkeys(WITHOUT_SUM, (None, True)), found, f"{path}/")


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
        raise DamagedCheckpoint(path, [f"{file}: {CHANGED}"]) from error
    if theirs != content[SAVE]:
        raise DamagedCheckpoint(path, [f"{path / ARRAYS}: not the arrays that were saved with this manifest"])
