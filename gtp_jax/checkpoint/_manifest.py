"""The manifest of a checkpoint: a JSON file that is stored with the arrays and read before them."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from .._foreign import MAX_JSON_BYTES, parse_json
from ..recipes import Recipe
from ._checksums import LAST_KEY, sealed, unsealed
from ._foreign_json import check_manifest
from ._leaf import Leaf
from ._side_files import describe

# Increased whenever checkpoints change so that another version would misread them.
FORMAT = 2

_SHOWN = 8

# The size limit of `extra` in bytes: half of a manifest. The other half is left for the descriptions of the arrays.
_MAX_EXTRA = MAX_JSON_BYTES // 2

# The key of a random number that a step's manifest and its arrays share, so that another step's arrays are detected.
SAVE = "save"

# The key of the sizes and checksums of the files stored with the arrays; absent if there are none.
FILES = "files"


def manifest(
    step: int,
    leaves: Sequence[Leaf],
    extra: dict[str, Any] | None,
    *,
    static: Mapping[str, str],
    files: Mapping[str, bytes],
    loss: float | None = None,
    recipe: Recipe | None = None,
) -> dict[str, Any]:
    """Returns the manifest of a checkpoint, without the digests of its arrays.

    Args:
        step: the step of the checkpoint.
        leaves: the arrays of the checkpoint.
        extra: the caller's own content; `None` means an empty dict.
        static: the static fields of the state.
        files: the contents of the files stored with the arrays, by name.
        loss: the loss of the state; NaN and infinities are recorded as no loss.
        recipe: the recipe that the state was trained with.

    Raises:
        ValueError: if `extra` is too large or too deeply nested to be read back, if there are too many files, or if a
            file is too large or its name is not a plain file name.
        TypeError: if `extra` is not a dict that JSON can hold, or a file's content is not bytes.
    """
    entries = {leaf.name: _entry(leaf) for leaf in leaves}
    versions = {name: _version(name) for name in ("gtp_jax", "jax", "orbax-checkpoint")}
    content = {
        "format": FORMAT,
        **versions,
        "step": step,
        SAVE: secrets.token_hex(16),
        "leaves": entries,
        "static": dict(static),
        "extra": _as_json({} if extra is None else extra),
        "recipe": recipe and recipe.describe(),
        "loss": float(loss) if loss is not None and math.isfinite(loss) else None,
    }
    return content | {FILES: describe(files)} if files else content


def complete(content: dict[str, Any], digests: Mapping[str, str]) -> str:
    """Returns the text of a manifest with the digests of the arrays as they are on disk, and its own checksum."""
    leaves = {name: {**entry, "digest": digests[name]} for name, entry in content["leaves"].items()}
    return sealed(json.dumps({**content, "leaves": leaves}), LAST_KEY)


def read(text: str) -> dict[str, Any]:
    """Returns a manifest from its file's text.

    Raises:
        ValueError: if it has changed since it was written, or a field has the wrong type.
    """
    content = unsealed(text, LAST_KEY)
    check_manifest(content)
    return content


def check_format(saved: dict[str, Any], where: str) -> None:
    """Refuses checkpoints whose arrays this version would misread.

    Args:
        saved: the manifest.
        where: the name of the checkpoint in messages.

    Raises:
        ValueError: if the formats differ; names both.
    """
    if saved["format"] != FORMAT:
        raise ValueError(
            f"{where} has format {saved['format']}, written by gtp_jax {saved['gtp_jax']}; this version reads format "
            f"{FORMAT}. Read it with a version of gtp_jax that writes format {saved['format']}."
        )


def check(saved: dict[str, Any], leaves: Sequence[Leaf], static: Mapping[str, str], where: str, part: str = "") -> None:
    """Compares a manifest with the leaves and static fields to be restored whose names begin with `part`.

    Raises:
        ValueError: if the checkpoint or the model lacks an array, or their shapes, dtypes or static fields differ;
            names the first few paths.
    """
    has = {name: _text(entry) for name, entry in saved["leaves"].items()} | saved["static"]
    wants = {leaf.name: _text(_entry(leaf)) for leaf in leaves} | dict(static)
    what = "arrays and static fields" if static or saved["static"] else "arrays"
    every = [name for name in {**wants, **has} if name.startswith(part)]
    names = [name for name in every if has.get(name) != wants.get(name)]
    if not names:
        return
    none = "no such array"
    lines = [f"  {name}: the checkpoint has {has.get(name, none)}, the model {wants.get(name, none)}" for name in names]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"  and {len(lines) - _SHOWN} more"]
    raise ValueError(
        f"{where} belongs to another model or optimizer ({len(names)} of {len(every)} {what} differ):\n"
        + "\n".join(lines)
        + "\nRestore it with the configuration it was saved with, or train into another directory."
    )


def _as_json(extra: dict[str, Any]) -> dict[str, Any]:
    """Returns `extra` as it will be read back: a copy, because the caller may change `extra` while it is written."""
    if not isinstance(extra, dict):
        raise TypeError(f"`extra` is a {type(extra).__name__}; it must be a dict.")
    try:
        text = json.dumps(extra)
        copy = json.loads(text)
    except RecursionError as error:
        raise ValueError("`extra` has too many levels of lists and dicts to be read back. Store less in it.") from error
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`extra` cannot be written as JSON: {error}. Use numbers, strings, lists and dicts."
        ) from error
    if json.dumps(copy) != text:
        raise TypeError("`extra` has two keys of one dict that are the same in JSON, as 1 and '1' are. Rename one.")
    if len(text) > _MAX_EXTRA:
        raise ValueError(f"`extra` has {len(text)} bytes of JSON; at most {_MAX_EXTRA} can be read back. Store less.")
    try:
        parse_json(text.encode())
    except ValueError as error:
        raise ValueError(f"`extra` could not be read back: {error}. Store less in it.") from error
    return copy


def _entry(leaf: Leaf) -> dict[str, Any]:
    return {"shape": list(leaf.shape), "dtype": leaf.dtype}


def _text(entry: Mapping[str, Any]) -> str:
    return f"{entry['dtype']}{entry['shape']}".replace(" ", "")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a checkout on the path, not installed
        return "unknown"
