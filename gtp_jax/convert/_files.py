"""Finds the tensors in the files of a Hugging Face model."""

from __future__ import annotations

from pathlib import Path

from .._foreign import brief, inside, read_json
from ._safetensors import Reader

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def shard_file(index: int, count: int) -> str:
    """Returns the name of file `index`, counted from 0, of `count` files."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def open_tensors(directory: Path) -> dict[str, Reader]:
    """Returns the file of each tensor. Reads and checks headers, but no values.

    Raises:
        FileNotFoundError: if there are no safetensors files, or the index names a file that does not exist.
        ValueError: if a file is damaged or is a link out of the directory, if the index and the files disagree, or if
            there are a single file and an index of other files.
    """
    index = directory / INDEX_FILE
    if _is_there(index):
        where = _weight_map(index)
        if _is_there(directory / SINGLE_FILE) and SINGLE_FILE not in where.values():
            raise ValueError(
                f"{directory} holds {SINGLE_FILE} and {INDEX_FILE}, which names other files: two models. Delete or "
                "move the one that does not belong there."
            )
    elif _is_there(directory / SINGLE_FILE):
        reader = Reader(directory / SINGLE_FILE, place=inside(directory, SINGLE_FILE))
        return dict.fromkeys(reader.entries, reader)
    else:
        raise FileNotFoundError(
            f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}. Give a directory with a Hugging Face model "
            "in safetensors; other formats can be converted with transformers' `save_pretrained`."
        )
    missing, places = [], {}
    for file in sorted(set(where.values())):
        try:
            places[file] = inside(directory, file)
        except FileNotFoundError:
            missing.append(file)
        except ValueError as error:
            raise ValueError(f"{index} names a file that must not be read: {error}") from error
    if missing:
        raise FileNotFoundError(f"{index} names {', '.join(missing)}, not in {directory}. Download them as well.")
    readers = {file: Reader(directory / file, place=place) for file, place in places.items()}
    held = {name: file for file, reader in readers.items() for name in reader.entries}
    for name in {**where, **held}:
        if where.get(name) != held.get(name):
            raise ValueError(
                f"{name} is in {held.get(name, 'no file')}, but {index} has it in {where.get(name, 'no file')}. Files "
                "and index do not belong to the same model; download both again."
            )
    return {name: readers[file] for name, file in held.items()}


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _weight_map(index: Path) -> dict[str, str]:
    """Returns the file of each tensor according to the index."""
    place = inside(index.parent, index.name)
    try:
        where = read_json(place)["weight_map"]
        strange = [file for file in where.values() if not isinstance(file, str)]
        if strange:
            raise ValueError(f"it names {brief(strange[0])} as a file")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{index} cannot be read as an index with an object `weight_map`: {why}. Download or write it again."
        ) from error
    return where
