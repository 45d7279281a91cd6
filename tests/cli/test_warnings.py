"""Warnings of a command are printed like its errors."""

from __future__ import annotations

import warnings

from gtp_jax.runner import cli
from gtp_jax.runner.cli._warnings import plain_warnings

OURS = str(cli.__file__)


def printed(filename: str) -> str:
    return warnings.formatwarning(UserWarning("10 are cut"), UserWarning, filename, 3, "corpus = read()")


def test_a_warning_of_the_package_is_one_line_with_the_command():
    with plain_warnings("train"):
        assert printed(OURS) == "gtp-jax train: warning: 10 are cut\n"


def test_a_warning_shows_the_control_characters_of_a_name_and_does_not_send_them_to_the_terminal():
    with plain_warnings("train"):
        said = warnings.formatwarning(UserWarning("a\x1b[31m.npy is short"), UserWarning, OURS, 3)
    assert said == "gtp-jax train: warning: a\\x1b[31m.npy is short\n"


def test_warnings_of_others_keep_their_place_and_so_do_those_outside_a_command():
    python = printed("/elsewhere/jax.py"), printed(OURS)
    with plain_warnings("train"):
        assert printed("/elsewhere/jax.py") == python[0] != printed(OURS)
    assert printed(OURS) == python[1]
