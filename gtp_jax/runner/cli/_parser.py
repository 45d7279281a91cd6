"""The parser of the command line and of every subcommand."""

from __future__ import annotations

import argparse
import copy
import difflib
import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn

from ..._foreign import printable

# Adds the parser of a command, given its description, and returns it.
AddParser = Callable[..., argparse.ArgumentParser]

# Negative numbers that `float` accepts. argparse does not recognize exponents, and would treat such a value as a flag.
_NEGATIVE = re.compile(r"-(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(e[-+]?\d+)?$|-(inf|infinity|nan)$", re.IGNORECASE)


_EXAMPLE_LINES = 9  # of the examples that the brief help repeats, with their heading
_USAGE_LINES = 12  # a longer usage fills the terminal, and the message below it is easily missed


class Parser(argparse.ArgumentParser):
    """Refuses unknown words; the message shows the usage of the command that got them, and the nearest known word.

    argparse creates the parsers of subcommands with the same class, so this applies to all of them. A negative number
    is a value, not a flag; the flag's own check refuses it. Messages repeat user input in a form that a terminal
    displays but does not interpret.

    Args:
        main: the arguments that `--help` shows, by name without dashes; `--help-all` shows all. If empty, `--help`
            shows all.
        args, options: those of `argparse.ArgumentParser`.
    """

    def __init__(self, *args: Any, main: Collection[str] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self._negative_number_matcher = _NEGATIVE
        self._main = main
        if main:
            self.add_argument(
                "--help-all", action=_HelpAll, nargs=0, dest="help", default=argparse.SUPPRESS, help="show all options"
            )

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

    def format_help(self) -> str:
        """Returns what `--help` prints."""
        return self._brief_help() if self._main else self.complete_help()

    def complete_help(self) -> str:
        """Returns what `--help-all` prints: the help of every option, in groups."""
        return super().format_help()

    def _brief_help(self) -> str:
        own = {name.lstrip("-"): action for action in self._actions for name in action.option_strings or (action.dest,)}
        formatter = argparse.RawDescriptionHelpFormatter(self.prog, max_help_position=26)
        formatter.add_usage(f"{self.prog} [options]", [], [])
        paragraph = " ".join((self.description or "").split("\n\n")[0].split())
        formatter.add_text(textwrap.fill(paragraph, shutil.get_terminal_size().columns - 2))
        formatter.start_section("main options")
        formatter.add_arguments([_shortened(own[name]) for name in self._main])
        formatter.end_section()
        formatter.add_text("\n".join((self.epilog or "").splitlines()[:_EXAMPLE_LINES]))
        flags = sum(bool(action.option_strings) for action in self._actions)
        groups = ", ".join(str(group.title) for group in self._action_groups[2:] if group._group_actions)
        formatter.add_text(f"`{self.prog} --help-all` explains all {flags} options{': ' + groups if groups else ''}.")
        return formatter.format_help()

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


class _HelpAll(argparse.Action):
    """Prints the complete help, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, Parser)
        print(parser.complete_help(), end="")
        parser.exit()


def _shortened(action: argparse.Action) -> argparse.Action:
    """Returns an option with the first clause of its help, and without a list of choices."""
    short = copy.copy(action)
    short.help = re.split(r"[;:] | \(default", action.help or "")[0]
    if action.choices is not None and action.metavar is None:
        short.metavar, short.choices = action.dest.upper(), None
    short.option_strings = action.option_strings[:1]
    return short


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
