"""Fields of a dataclass as flags of a command line, told once: default, kind and help."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any


def knob(default: Any, group: str, text: str, *, kind: Any = int, **options: Any) -> Any:
    """A field that the command line offers as a flag, in a group of the help, with its argparse options."""
    return dataclasses.field(default=default, metadata={"group": group, "help": text, "type": kind, **options})


def count_or(word: str) -> Callable[[str], int | str]:
    """A number of layers, or a word in its place, for `type=`."""

    def parse(text: str) -> int | str:
        if text == word:
            return word
        try:
            return int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {word!r}") from None

    return parse


def flag_of(field: dataclasses.Field[Any]) -> str:
    """A field's flag: `--keep-last` of `keep_last`."""
    return f"--{field.name.rstrip('_').replace('_', '-')}"


def add_flag(parser: Any, field: dataclasses.Field[Any]) -> None:
    """Adds the flag of a `knob` to a parser or to a group of one. What is not given is left out of the result."""
    options = dict(field.metadata)
    text, kind, _ = options.pop("help"), options.pop("type"), options.pop("group")
    shown = "" if field.default in (None, ()) or "(default" in text else f" (default: {field.default})"
    shared: Any = {"dest": field.name, "default": argparse.SUPPRESS}
    if kind is bool:
        parser.add_argument(flag_of(field), action=argparse.BooleanOptionalAction, help=text, **shared)
    else:
        options = {"action": "extend", **options} if "nargs" in options else options  # given again, it adds
        parser.add_argument(flag_of(field), type=kind, help=text + shown, **shared, **options)
