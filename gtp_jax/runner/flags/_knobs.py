"""Turns fields of frozen dataclasses into flags of a command line. A field declares its default, kind, range and help.

A configuration is composed of pieces: dataclasses of such fields, which several commands share. Flags and settings
files name the fields of the pieces as if they were the configuration's own.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import numbers
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ..._foreign import brief
from ..._words import MOST


def knob(
    default: Any,
    group: str,
    text: str,
    *,
    kind: Any = int,
    least: int | None = None,
    most: int = (1 << 63) - 1,
    above: float | None = None,
    per_process: bool = False,
    **options: Any,
) -> Any:
    """Declares a field that the command line offers as a flag.

    Args:
        default: the default of the field.
        group: the group of the flag in the help.
        text: the help of the flag.
        kind: converts the flag's text; `bool` makes a pair of flags, `--name` and `--no-name`.
        least: the smallest whole number allowed; 1 by default for an `int`.
        most: the largest whole number allowed.
        above: the number that the value must exceed.
        per_process: whether the processes of a run may have different values, for example of a path.
        options: further options of `add_argument`; `check_knobs` also checks `choices`.
    """
    least = 1 if least is None and kind is int else least
    ranges = {"least": least, "most": most, "above": above}
    metadata = {"group": group, "help": text, "type": kind, "range": ranges, "per_process": per_process}
    return dataclasses.field(default=default, metadata={**metadata, "options": options})


def piece(kind: type) -> Any:
    """Declares a field that holds a dataclass of knobs, by default with its defaults."""
    return dataclasses.field(default_factory=kind, metadata={"piece": kind})


def check_knobs(config: Any) -> None:
    """Checks the types, ranges and choices of a dataclass's own knobs; `None` means a default that is chosen later.

    Raises:
        ValueError: if a value is not allowed; the message names the field, its value and what is allowed.
    """
    for field in dataclasses.fields(config):
        if "piece" not in field.metadata:
            check_value(field, getattr(config, field.name))


def check_value(field: dataclasses.Field[Any], value: Any) -> None:
    """Checks the type, range and choices of a knob's value; `None` means a default that is chosen later.

    Raises:
        ValueError: if the value is not allowed; the message names the field, its value and what is allowed.
    """
    if value is None:
        if field.default is not None:
            raise ValueError(f"`{field.name}` is None; give a value, or leave it out.")
        return
    name, least, most, above = field.name.rstrip("_"), *field.metadata["range"].values()
    _check_type(name, value, field)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if least is not None and not (whole and value >= least):
        raise ValueError(f"`{name}` is {brief(value)}; it must be a whole number of at least {least}.")
    if whole and field.metadata["type"] is not float and value > most:
        raise ValueError(f"`{name}` is {brief(value)}; it must be a whole number from {least or 0} to {most}.")
    if above is not None and not above < value <= MOST:
        raise ValueError(f"`{name}` is {brief(value)}; it must be a number above {above:g}, at most {MOST:.7g}.")
    if field.metadata["type"] is float and not abs(value) <= MOST:
        raise ValueError(f"`{name}` is {brief(value)}; it must be a number, at most {MOST:.7g}.")
    choices = field.metadata["options"].get("choices")
    several: Any = value if "nargs" in field.metadata["options"] else (value,)
    for one in several:
        if choices is not None and one not in choices:
            near = difflib.get_close_matches(str(one), choices, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"`{name}` is {one!r}; it must be one of {', '.join(choices)}.{hint}")


# The type of a knob's value by its `kind`. A bool never counts as a number. A kind that is a parser checks its values.
_TYPES: dict[Any, tuple[type, str]] = {
    bool: (bool, "true or false"),
    str: (str, "text"),
    float: (numbers.Real, "a number"),
}


def _check_type(name: str, value: Any, field: dataclasses.Field[Any]) -> None:
    allowed, what = _TYPES.get(field.metadata["type"], (object, ""))
    several = "nargs" in field.metadata["options"]
    for one in value if several else (value,):
        if not isinstance(one, allowed) or (allowed is numbers.Real and isinstance(one, bool)):
            raise ValueError(f"`{name}` is {value!r}; it must be {what}{', once or several times' if several else ''}.")


def as_tuple(config: Any, *names: str) -> None:
    """Converts fields of a frozen dataclass from lists, which JSON and argparse give, to tuples; keeps `None`.

    Raises:
        ValueError: if a value is neither a tuple nor a list.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not isinstance(value, tuple | list):
            raise ValueError(f"`{name}` is {value!r}; it must be a list.")
        object.__setattr__(config, name, value if value is None else tuple(value))


def count_or(*words: str) -> Callable[[str], int | str]:
    """Returns a parser for `kind=`, which accepts a number of layers or one of `words`."""

    def parse(text: str) -> int | str:
        if text in words:
            return text
        try:
            return int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is neither a number nor {' or '.join(map(repr, words))}"
            ) from None

    return parse


def knobs(kind: Any) -> Iterator[dataclasses.Field[Any]]:
    """Yields all knobs of a dataclass, with the knobs of each piece at its place."""
    for field in dataclasses.fields(kind):
        if "piece" in field.metadata:
            yield from knobs(field.metadata["piece"])
        else:
            yield field


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Returns a knob's flag, such as `--high-precision-last` for `high_precision_last`."""
    return f"--{field.name.rstrip('_').replace('_', '-')}"


def add_flags(parser: Any, kind: Any, but: Collection[str] = ()) -> dict[str, Any]:
    """Adds a flag for each knob of a dataclass except those in `but`, and returns the groups of flags by name.

    A flag that is not given does not appear in the parsed arguments, so that `given` can distinguish it.
    """
    groups: dict[str, Any] = {}
    for field in knobs(kind):
        if field.name in but:
            continue
        name = field.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        _add_flag(groups[name], field)
    return groups


def given(args: argparse.Namespace, kind: Any) -> dict[str, Any]:
    """Returns the knobs of a dataclass that the command line has set."""
    return {field.name: getattr(args, field.name) for field in knobs(kind) if hasattr(args, field.name)}


def from_settings[T](kind: type[T], settings: Mapping[str, Any]) -> T:
    """Makes a configuration from the values of knobs by name; the other knobs have their defaults.

    Raises:
        TypeError: if a name is not a knob.
    """
    rest, pieces = dict(settings), {}
    for field in dataclasses.fields(kind):  # pyright: ignore[reportArgumentType]
        if (inner := field.metadata.get("piece")) is not None:
            names = {knob.name for knob in knobs(inner)}
            pieces[field.name] = from_settings(inner, {name: rest.pop(name) for name in names & rest.keys()})
    return kind(**pieces, **rest)


def settings_of(config: Any) -> dict[str, Any]:
    """Returns the values of all knobs of a configuration, by name."""
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        settings |= settings_of(value) if "piece" in field.metadata else {field.name: value}
    return settings


def _add_flag(parser: Any, field: dataclasses.Field[Any]) -> None:
    text, kind, options = field.metadata["help"], field.metadata["type"], field.metadata["options"]
    shown = "" if field.default in (None, ()) or "(default" in text else f" (default: {field.default})"
    shared: Any = {"dest": field.name, "default": argparse.SUPPRESS}
    if kind is bool:
        parser.add_argument(flag_of(field), action=argparse.BooleanOptionalAction, help=text, **shared)
    else:
        options = {"action": "extend", **options} if "nargs" in options else options  # a repeated flag adds values
        parser.add_argument(flag_of(field), type=kind, help=text + shown, **shared, **options)
