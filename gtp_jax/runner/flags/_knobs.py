"""Fields of frozen dataclasses as flags of a command line: default, kind, range and help are said once, in the field.

A configuration is composed of pieces, dataclasses of such fields that several commands share. Flags, and files of
settings, name the fields of the pieces as if they were the configuration's own.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import numbers
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ..._foreign import brief
from ...ops import MOST


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
        default: the field's.
        group: of the help.
        text: of the help.
        kind: converts the flag's text; `bool` makes a pair, `--name` and `--no-name`.
        least: smallest whole number allowed; 1 for an `int`.
        most: largest whole number allowed.
        above: what a number must exceed.
        per_process: processes of one run may have different values, of a path for instance.
        options: further ones of `argparse`; `choices` is checked by `check_knobs` too.
    """
    least = 1 if least is None and kind is int else least
    ranges = {"least": least, "most": most, "above": above}
    metadata = {"group": group, "help": text, "type": kind, "range": ranges, "per_process": per_process}
    return dataclasses.field(default=default, metadata={**metadata, "options": options})


def piece(kind: type) -> Any:
    """Declares a field that holds a dataclass of knobs, with its defaults."""
    return dataclasses.field(default_factory=kind, metadata={"piece": kind})


def check_knobs(config: Any) -> None:
    """Checks types, ranges and choices of a dataclass's own knobs; `None` stands for a default that is decided later.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    for field in dataclasses.fields(config):
        if "piece" not in field.metadata:
            check_value(field, getattr(config, field.name))


def check_value(field: dataclasses.Field[Any], value: Any) -> None:
    """Checks type, range and choices of a knob's value; `None` stands for a default that is decided later.

    Raises:
        ValueError: naming the field, its value and what is allowed.
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


# Types by the `kind` of a knob; bool counts as a number nowhere. A kind that is a parser has checks of its own.
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
    """Makes tuples of a frozen dataclass's fields that are lists, as JSON and argparse give them; `None` stays.

    Raises:
        ValueError: if a value is neither a tuple nor a list.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not isinstance(value, tuple | list):
            raise ValueError(f"`{name}` is {value!r}; it must be a list.")
        object.__setattr__(config, name, value if value is None else tuple(value))


def count_or(*words: str) -> Callable[[str], int | str]:
    """Returns a parser, for `kind=`, of a number of layers or of one of `words` instead."""

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
    """Yields all knobs of a dataclass, those of its pieces in their place."""
    for field in dataclasses.fields(kind):
        if "piece" in field.metadata:
            yield from knobs(field.metadata["piece"])
        else:
            yield field


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Returns a knob's flag: `--high-precision-last` of `high_precision_last`."""
    return f"--{field.name.rstrip('_').replace('_', '-')}"


def add_flags(parser: Any, kind: Any, but: Collection[str] = ()) -> dict[str, Any]:
    """Adds a flag for each knob of a dataclass, but for some, in groups, which are returned by name.

    A flag that is not given leaves nothing in the parsed arguments, so that `given` tells it from one that is.
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
    """Makes a configuration of its knobs' values by name, defaults for the others.

    Raises:
        TypeError: if there is no such knob.
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
        options = {"action": "extend", **options} if "nargs" in options else options  # given again, it adds
        parser.add_argument(flag_of(field), type=kind, help=text + shown, **shared, **options)
