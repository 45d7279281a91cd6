"""Files of settings: flags of a command by name, in YAML, of which JSON is a part."""

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

# The key that says which version wrote a file; the configuration of a run has it too.
VERSION_KEY = "gtp_jax"


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML itself takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(problem=f"{brief(key)} is there twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def _number(loader: _Loader, node: Any) -> int | float | str:
    """Returns a number as Python reads it, and a flag with it; text if Python does not: 12:30 is 750 in YAML."""
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
    """Returns the settings of a file by the names of their fields; without those that are null.

    A key is a flag's name without its dashes in front: `save_every` or `save-every`.

    Args:
        path: of the file.
        fields: the knobs that it may name.
        not_of_files: names of flags that are no settings, for messages.

    Raises:
        ValueError: if it is no YAML, names what is no flag, which is answered with the nearest name, or has a value of
            another type or out of range.
        OSError: if it cannot be read.
    """
    content = _content(path)
    known = {field.name.rstrip("_"): field for field in fields}
    settings, unknown = {}, []
    for key, value in content.items():
        name = str(key).replace("-", "_").rstrip("_")
        if name == VERSION_KEY:
            continue
        if name in not_of_files:
            raise ValueError(f"{path} has {key!r}, which is of one start. Leave it out, and give --{key} as a flag.")
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
        raise ValueError(f"{path} has {', '.join(unknown)}, and there is no such flag.")
    return settings


def write_settings(path: Path, settings: Mapping[str, Any], version: str) -> None:
    """Writes settings so that `read_settings` reads them. A file that is there is replaced if this has written it.

    Args:
        path: of the file, whose folder must exist.
        settings: by the names of fields.
        version: of the library.

    Raises:
        ValueError: if there is another file, or no folder.
        OSError: if it cannot be written.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no directory {path.parent}. Make it, or give another.")
    if os.path.lexists(path):
        try:
            ours = VERSION_KEY in _content(path)
        except ValueError:
            ours = False
        if not ours:
            raise ValueError(f"{path} is there, and gtp-jax has not written it. Give another path, or remove it.")
    values = {name.rstrip("_"): list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    text = yaml.safe_dump({VERSION_KEY: version, **values}, sort_keys=False, default_flow_style=None, width=120)
    new = path.with_name(f"{path.name}.new")  # so that a kill leaves the old one
    new.write_text(text)
    new.replace(path)


def _content(path: str | os.PathLike[str]) -> dict[Any, Any]:
    with open_regular(path) as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"{path} has more than {MAX_JSON_BYTES} bytes, which is the most that is read.")
    try:
        content = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" (line {error.problem_mark.line + 1})"
        raise ValueError(f"{path} is not YAML: {error.problem}{line}. Write a flag a line, `steps: 500`.") from error
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is not YAML: {error}. Write a flag a line, `steps: 500`.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {brief(content)}. Write a flag a line, `steps: 500`.")
    return content


def _value(field: dataclasses.Field[Any], value: Any) -> Any:
    """Returns a value as its flag would make it.

    Raises:
        ValueError: if it is of another type or out of range.
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
        return kind(value)  # YAML takes 1e-3 for text
    except (ValueError, argparse.ArgumentTypeError):
        what = {int: "a whole number", float: "a number"}.get(kind, f"as --{name.replace('_', '-')} has it")
        raise ValueError(f"`{name}` is {value!r}; it must be {what}.") from None
