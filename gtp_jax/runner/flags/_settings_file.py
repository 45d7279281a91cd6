"""Reads and writes settings files: flags of a command by name, in YAML, of which JSON is a subset."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from ..._foreign import MAX_JSON_BYTES, brief, open_regular
from ._knobs import check_value

# The key for the version of gtp_jax that wrote a file; the saved configuration of a run has it too.
VERSION_KEY = "gtp_jax"


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which PyYAML takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(problem=f"{brief(key)} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def _number(loader: _Loader, node: Any) -> int | float | str:
    """Returns a number as Python and flags would parse it, or text if Python would not: 12:30 is 750 in YAML."""
    text = loader.construct_scalar(node)
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _number)


def read_settings(
    path: str | os.PathLike[str], fields: Iterable[dataclasses.Field[Any]], not_of_files: Iterable[str] = ()
) -> dict[str, Any]:
    """Returns the settings in a file by field name.

    A key is a flag's name without the leading dashes: `save_every` or `save-every`. Null values of fields whose default
    is `None` are left out.

    Args:
        path: the path of the file.
        fields: the knobs that the file may set.
        not_of_files: names of flags that are not settings, for messages.

    Raises:
        ValueError: if the file is not YAML, has a key that is not a flag (the message suggests the nearest name), or
            has a value of the wrong type or out of range.
        OSError: if the file cannot be read.
    """
    content = _content(path)
    known = {field.name.rstrip("_"): field for field in fields}
    settings, unknown = {}, []
    for key, value in content.items():
        name = str(key).replace("-", "_").rstrip("_")
        if name == VERSION_KEY:
            continue
        if name in not_of_files:
            raise ValueError(
                f"{path} has {key!r}, which applies to one start. Leave it out, and give the flag --{key}."
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            unknown.append(f"{brief(key)}{f' (did you mean {near[0]!r}?)' if near else ''}")
            continue
        field = known[name]
        if field.name in settings:
            raise ValueError(f"{path} has {key!r} twice, in two spellings. Leave one.")
        if value is None and field.default is None:
            continue
        try:
            settings[field.name] = _value(field, value)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    if unknown:
        raise ValueError(f"{path} has {', '.join(unknown)}, but there is no such flag.")
    return settings


def write_settings(path: Path, settings: Mapping[str, Any], version: str) -> None:
    """Writes settings for `read_settings`. Replaces an existing file only if this function wrote it.

    Args:
        path: the path of the file, whose folder must exist.
        settings: the settings by field name.
        version: the version of the library.

    Raises:
        ValueError: if another file exists at the path, or the folder does not exist.
        OSError: if the file cannot be written.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no directory {path.parent}. Create it, or give another.")
    if os.path.lexists(path):
        try:
            ours = VERSION_KEY in _content(path)
        except ValueError:
            ours = False
        if not ours:
            raise ValueError(f"{path} exists and was not written by gtp-jax. Give another path, or remove it.")
    values = {name.rstrip("_"): list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    text = yaml.safe_dump({VERSION_KEY: version, **values}, sort_keys=False, default_flow_style=None, width=120)
    new = path.with_name(f"{path.name}.new")  # so that the old file survives a kill
    new.write_text(text)
    new.replace(path)


def _content(path: str | os.PathLike[str]) -> dict[Any, Any]:
    with open_regular(path) as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"{path} has more than {MAX_JSON_BYTES} bytes, the maximum.")
    try:
        content = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" (line {error.problem_mark.line + 1})"
        raise ValueError(
            f"{path} is not YAML: {error.problem}{line}. Write one flag per line: `steps: 500`."
        ) from error
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is not YAML: {error}. Write one flag per line: `steps: 500`.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {brief(content)}. Write one flag per line: `steps: 500`.")
    return content


def _value(field: dataclasses.Field[Any], value: Any) -> Any:
    """Converts a value as its flag would.

    Raises:
        ValueError: if the value has the wrong type or is out of range.
    """
    several = "nargs" in field.metadata["options"]
    if several:
        value = tuple(_one(field, one) for one in (value if isinstance(value, list) else [value]))
    else:
        value = _one(field, value)
    check_value(field, value)
    return value


def _one(field: dataclasses.Field[Any], value: Any) -> Any:
    kind, name = field.metadata["type"], field.name.rstrip("_")
    if kind is str and not isinstance(value, str):
        raise ValueError(f"`{name}` is {brief(value)}; it must be text. Put it in quotes if that is what you mean.")
    if kind in (str, bool) or not isinstance(value, str):
        return value
    try:
        return kind(value)  # YAML reads 1e-3 as text
    except (ValueError, argparse.ArgumentTypeError):
        what = {int: "a whole number", float: "a number"}.get(kind, f"a value of --{name.replace('_', '-')}")
        raise ValueError(f"`{name}` is {value!r}; it must be {what}.") from None
