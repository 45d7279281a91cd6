"""Words that a command does not know are refused with that command's usage and the nearest word that it knows."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from gtp_jax.runner.cli import main
from gtp_jax.runner.cli._main import parser


def commands(parent: argparse.ArgumentParser) -> Iterator[tuple[str, ...]]:
    """The words that lead to each command that takes no further one."""
    below = [action for action in parent._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield ()
    for name, child in below[0].choices.items() if below else ():
        yield from ((name, *words) for words in commands(child))


def refused(capsys, *words: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(words)
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    return err


@pytest.mark.parametrize("words", list(commands(parser())), ids=" ".join)
def test_a_misspelt_flag_prints_the_usage_of_its_command_and_the_nearest_flag(words, capsys):
    err = refused(capsys, *words, "--hepl")
    name = " ".join(words)
    assert err.startswith(f"usage: gtp-jax {name} [-h]")
    assert err.endswith(f"gtp-jax {name}: error: unrecognized arguments: --hepl. Did you mean --help?\n")


@pytest.mark.parametrize(
    "words, message",
    [
        (["train", "--save_every=5"], "unrecognized arguments: --save_every=5. Did you mean --save-every?"),
        (
            ["train", "--stpes", "5", "--bacth", "2"],
            "unrecognized arguments: --stpes --bacth. Did you mean --steps, --batch?",
        ),
        (["train", "--stepz", "5"], "unrecognized arguments: --stepz. Did you mean --steps or --step?\n"),
        (["train", "--", "--stepz"], "unrecognized arguments: -- --stepz. Did you mean --steps or --step?\n"),
        (["train", "--zgtp", "2"], "unrecognized arguments: --zgtp. Did you mean --gtp?\n"),
        (["bench", "recipes", "--ouut", "x"], "unrecognized arguments: --ouut. Did you mean --out?"),  # required
        (["train", "--zzzz"], "unrecognized arguments: --zzzz\n"),
        (["trian", "--steps", "3"], "Did you mean train?"),
        (["convert", "exprt", "a", "b"], "Did you mean export?"),
        (["convert", "export", "a", "b", "--dtype", "nvfp8"], "Did you mean nvfp4?"),
        (["--tracebak", "doctor"], "gtp-jax: error: unrecognized arguments: --tracebak. Did you mean --traceback?"),
    ],
)
def test_the_nearest_word_is_named(words, message, capsys):
    assert message in refused(capsys, *words)


def test_a_message_fits_a_terminal_below_a_long_usage(capsys):
    lines = refused(capsys, "train", "--stpes", "5").splitlines()
    assert (
        lines[:2] == ["usage: gtp-jax train [-h] ...", "`gtp-jax train --help` lists the options."] and len(lines) == 3
    )
    assert "[--spike SIGMAS]" not in refused(capsys, "train", "--optimizer", "adam")
    assert "--step N" in refused(capsys, "convert", "export", "--stpe", "5")  # a short one is whole


def test_values_that_look_like_flags_are_values(capsys):
    args = parser().parse_args(["checkpoint", "show", "--step=3", "--", "--stp"])
    assert (str(args.directory), args.step) == ("--stp", 3)
    args = parser().parse_args(["train", "--data", "--x y", "--warm", "3"])
    assert (args.data, args.warmup) == (["--x y"], 3)


@pytest.mark.parametrize("value", ["-1e-3", "-.5E2", "-1_0.", "-2", "-inf"])
def test_a_negative_number_is_a_value_which_the_flag_refuses(value, capsys):
    assert main(["train", "--lr", value]) == 2
    assert f"`lr` is {float(value)}; it must be a number above 0" in capsys.readouterr().err
    assert f"is {value!r}; it must be a positive number" in refused(capsys, "bench", "step", "--within", value)
