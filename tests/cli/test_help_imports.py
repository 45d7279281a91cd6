"""What tells a reader which commands there are imports none of them."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from gtp_jax.runner.cli import main, parser

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


@pytest.mark.parametrize("words", [["--help"], ["trian"]], ids=" ".join)
def test_help_and_words_that_are_no_command_import_neither_jax_nor_a_command(words):
    found = modules_of(*words)
    assert not {"jax", "jaxlib", "flax", "numpy", "optax", "orbax", "treescope", "matplotlib"} & found
    assert not [name for name in found if name.startswith("gtp_jax.runner.cli._train")]


def test_help_says_of_a_command_what_it_says_where_all_are_complete(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out == parser().format_help()


def test_every_command_of_the_help_has_its_arguments():
    (action,) = (one for one in parser()._actions if isinstance(one, argparse._SubParsersAction))
    assert all(child.get_default("run") or child._subparsers for child in action.choices.values())
