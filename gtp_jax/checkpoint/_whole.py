"""Whether a step's directory is whole: every file in it, and that its arrays and its manifest were saved together."""

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

# orbax's names: of its description of the arrays, and of the step.
_METADATA, _STEP_METADATA = "_METADATA", "_CHECKPOINT_METADATA"
# Files that nothing is read from, and that orbax writes last, when sums are taken already: always, so that one that is
# missing has been deleted, but only the form of their content is checked.
WITHOUT_SUM = (_STEP_METADATA, COMMITTED, f"{ARRAYS}/{COMMITTED}", f"{MANIFEST}/{COMMITTED}")
_BESIDE = f"{MANIFEST}/{FOLDER}"
_MARK = b"Checkpoint commit was successful"


def step_damage(path: Any) -> list[str]:
    """Returns what is wrong with the files of a step, a line each; none if all are as they were written.

    Reads every file in it. Files in `WITHOUT_SUM` are only checked to be there and for their form.

    Raises:
        OSError: if a file is there and cannot be read.
    """
    if strange := strange_files(path):
        return strange  # which must not be opened
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
            continue  # compared above, or with a manifest that cannot be read
        elif name != f"{MANIFEST}/{MANIFEST_FILE}" and not name.startswith(f"{ARRAYS}/"):
            lines.append(f"{path / name}: not part of the checkpoint")
    return lines


def _is_orbax(name: str, content: bytes) -> bool:
    """Says whether this is what orbax writes into a file."""
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
        path: of the step's directory.
        content: the manifest.

    Raises:
        DamagedCheckpoint: if they are another step's.
        OSError: if their description cannot be read.
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
