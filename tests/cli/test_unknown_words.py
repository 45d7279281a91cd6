"""Words that a command does not know are refused with that command's usage and the nearest word that it knows."""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from messages import naming

from gtp_jax import _words
from gtp_jax.convert._encoding import ENCODINGS
from gtp_jax.hlo import CHIPS
from gtp_jax.models import PRESETS
from gtp_jax.ops import MOST
from gtp_jax.recipes import GRAD_WIRES, RECIPES
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
    ("words", "message"),
    [
        ("train --save_every=5", "--save_every=5. --save-every?"),
        ("train --stpes 5 --bacth 2", "--stpes --bacth --steps --batch"),
        ("train -- --stepz", "--stepz --steps or --step?"),
        ("bench recipes --ouut x", "--ouut --out"),  # required
        ("convert export a b --dtype nvfp8", "mean nvfp4"),
        ("--tracebak doctor", "--tracebak --traceback"),
    ],
)
def test_the_nearest_word_is_named(words, message, capsys):
    assert re.search(naming(message), refused(capsys, *words.split()))
    assert "Did you mean" not in refused(capsys, "train", "--zzzz")


def test_values_that_look_like_flags_are_values():
    args = parser().parse_args(["checkpoint", "show", "--step=3", "--", "--stp"])
    assert (str(args.directory), args.step) == ("--stp", 3)
    args = parser().parse_args(["train", "--data", "--x y", "--warm", "3"])
    assert (args.data, args.warmup) == (["--x y"], 3)


@pytest.mark.parametrize("value", ["-1e-3", "-.5E2", "-inf"])
def test_a_negative_number_is_a_value_which_the_flag_refuses(value, capsys):
    assert main(["train", "--lr", value]) == 2
    assert re.search(naming(f"`lr` {float(value)} 0"), capsys.readouterr().err)
    assert re.search(naming(f"{value!r}"), refused(capsys, "bench", "step", "--within", value))


RUN = """
import sys
from gtp_jax.runner.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("modules", *sys.modules)
"""


def modules_of(*words: str) -> set[str]:
    """Returns the packages, and the modules of this one, that a command has imported when it exits."""
    ran = subprocess.run([sys.executable, "-c", RUN, *words], check=True, capture_output=True, text=True)
    names = ran.stdout.splitlines()[-1].split()
    return {name.partition(".")[0] for name in names} | {name for name in names if name.startswith("gtp_jax.")}


REFUSED = [
    ["train", "--help"],
    ["train", "--bogus"],
    ["train", "--seq", "long"],
    ["train", "--remat", "all"],
    ["train", "--keep", "0"],
    ["train", "--batch", "7", "--gtp", "2"],
    ["train", "--retries", "3"],
    *(["generate", "run"], ["checkpoint", "list"], ["convert", "export", "run", "out", "--dtype", "int4"]),
    *(["elastic", "rejoin", "run"], ["replay", "--step", "0"], ["doctor", "--bogus"]),
    *(["inspect", "--remat", "all"], ["plan-faults", "--bogus"]),
]


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_arguments_are_refused_before_jax_is_imported(words):
    """As far as it takes neither a device nor a model to know that they are wrong."""
    assert not {"jax", "jaxlib", "flax", "numpy", "optax", "orbax", "treescope", "matplotlib"} & modules_of(*words)


def test_settings_are_checked_together_only_where_those_not_given_are_defaults():
    """A run to resume, or a model to start from, has others."""
    for more, fits in ((), False), (["--from", "llama"], True), (["--resume"], True):
        args = parser(["train"]).parse_args(["train", "--num-heads", "3", *more])
        with contextlib.nullcontext() if fits else pytest.raises(ValueError, match=naming("`num_heads` 3")):
            args.check(args)


def test_the_words_of_options_are_the_names_of_what_they_choose():
    assert _words.RECIPE_NAMES == tuple(RECIPES) and _words.GRAD_WIRE_NAMES == tuple(GRAD_WIRES)
    assert _words.PRESET_NAMES == tuple(PRESETS)
    assert _words.CHIP_NAMES == tuple(CHIPS)
    assert _words.EXPORT_DTYPES == tuple(ENCODINGS)
    assert MOST == np.finfo(np.float32).max


@pytest.mark.parametrize("words", [["--help"], ["trian"]], ids=" ".join)
def test_help_and_words_that_are_no_command_import_neither_jax_nor_a_command(words):
    found = modules_of(*words)
    assert not {"jax", "jaxlib", "flax", "numpy", "optax", "orbax", "treescope", "matplotlib"} & found
    assert not [name for name in found if name.startswith("gtp_jax.runner.cli._train")]
