"""The files of a Hugging Face model, and which of them has which tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ._safetensors import Reader

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def shard_file(index: int, count: int) -> str:
    """Returns the name of one of several files."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def open_tensors(directory: Path) -> dict[str, Reader]:
    """Returns the file of each tensor, with headers read and checked, no values.

    Raises:
        FileNotFoundError: if there are no safetensors, or the index names a file that is not there.
        ValueError: if a file is not whole, or index and files do not agree.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        if not (directory / SINGLE_FILE).is_file():
            raise FileNotFoundError(
                f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}. Give a directory with a Hugging Face model "
                "in safetensors; other formats can be converted with transformers' `save_pretrained`."
            )
        reader = Reader(directory / SINGLE_FILE)
        return dict.fromkeys(reader.entries, reader)
    try:
        where: dict[str, str] = {
            name: _text(file) for name, file in json.loads(index.read_text())["weight_map"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} has no object `weight_map` ({error!r}). Download or write it again.") from error
    missing = sorted({file for file in where.values() if not (directory / file).is_file()})
    if missing:
        raise FileNotFoundError(f"{index} names {', '.join(missing)}, not in {directory}. Download them as well.")
    readers = {file: Reader(directory / file) for file in sorted(set(where.values()))}
    held = {name: file for file, reader in readers.items() for name in reader.entries}
    for name in {**where, **held}:
        if where.get(name) != held.get(name):
            raise ValueError(
                f"{name} is in {held.get(name, 'no file')}, but {index} has it in {where.get(name, 'no file')}. Files "
                "and index are not of one model; download both again."
            )
    return {name: readers[file] for name, file in held.items()}


def _text(file: Any) -> str:
    if not isinstance(file, str):
        raise TypeError(f"a file is named {file!r}")
    return file
