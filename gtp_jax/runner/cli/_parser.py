"""The parser of the command line and of every subcommand."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from ..._foreign import printable

# Adds the parser of a command, given its description, and returns it.
AddParser = Callable[..., argparse.ArgumentParser]

# Negative numbers that `float` accepts. argparse does not recognize exponents, and would treat such a value as a flag.
_NEGATIVE = re.compile(r"-(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(e[-+]?\d+)?$|-(inf|infinity|nan)$", re.IGNORECASE)


_USAGE_LINES = 12  # a longer usage fills the terminal, and the message below it is easily missed


class Parser(argparse.ArgumentParser):
    """Refuses unknown words; the message shows the usage of the command that got them, and the nearest known word.

    argparse creates the parsers of subcommands with the same class, so this applies to all of them. A negative number
    is a value, not a flag; the flag's own check refuses it. Messages repeat user input in a form that a terminal
    displays but does not interpret.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._negative_number_matcher = _NEGATIVE

    # none of the overloads is useful here
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses arguments, all of which must be known.

        argparse would first report missing required arguments, even if they are present with a typo, and would leave
        unknown ones for the top-level parser to refuse.
        """
        words = sys.argv[1:] if args is None else list(args)
        self._refuse([word for word in self._flags_in(words) if not self._knows(word)])
        parsed, unknown = super().parse_known_args(words, namespace)
        self._refuse(unknown)
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Prints the usage, shortened if it is long, and a message, and exits with status 2."""
        usage = self.format_usage()
        if usage.count("\n") > _USAGE_LINES:
            usage = f"usage: {self.prog} [-h] ...\n`{self.prog} --help` lists the options.\n"
        self.exit(2, f"{usage}{self.prog}: error: {printable(message)}\n")

    def _flags_in(self, words: Sequence[str]) -> Iterable[str]:
        """Returns the words that argparse treats as long flags, without those of a subcommand."""
        own = itertools.takewhile(lambda word: word != "--", words)
        if self._subparsers is not None:
            own = itertools.takewhile(lambda word: word.startswith("-"), own)
        return [word for word in own if word.startswith("--") and " " not in _name(word)]

    def _knows(self, word: str) -> bool:
        return any(flag.startswith(_name(word)) for flag in self._option_string_actions)  # argparse completes prefixes

    def _refuse(self, unknown: Sequence[str]) -> None:
        if unknown:
            flags = [_name(word) for word in unknown if word.startswith("-") and word != "--"]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(flags, self._option_string_actions)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += _hint([str(value)], map(str, action.choices or ()))
            raise


def _name(word: str) -> str:
    return word.partition("=")[0]


def _hint(words: Iterable[str], known: Iterable[str]) -> str:
    """Returns a question that names the nearest known words for each unknown word; empty if none is near."""
    known = list(known)
    near = [" or ".join(found) for word in words if (found := _nearest(word, known))]
    return f". Did you mean {', '.join(near)}?" if near else ""


def _nearest(word: str, known: Sequence[str]) -> list[str]:
    """Returns the known words that are nearest to `word`, those of the same length first; empty if none is near.

    difflib's own order prefers shorter words: it would name only `--step` for `--stepz`, and not `--steps`.
    """
    scores = {match: _likeness(word, match) for match in difflib.get_close_matches(word, known)}
    best = [match for match, score in scores.items() if score == max(scores.values())]
    return sorted(best, key=lambda match: len(match) != len(word))


def _likeness(word: str, other: str) -> float:
    """Returns the number of common characters, as a fraction of the longer word."""
    blocks = difflib.SequenceMatcher(None, other, word).get_matching_blocks()
    return sum(block.size for block in blocks) / max(len(word), len(other))
