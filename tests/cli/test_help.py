"""`--help` fits on a screen and shows the main options; `--help-all` shows every option."""

from __future__ import annotations

import pytest

from gtp_jax.runner.cli import main
from gtp_jax.runner.cli._main import parser

from .test_unknown_words import commands

LINES = 45


@pytest.mark.parametrize("words", [(), *commands(parser())], ids=" ".join)
def test_help_fits_on_a_screen_and_the_complete_help_has_every_option(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    brief, status = printed(capsys, *words, "--help")
    assert status == 0 and len(brief.splitlines()) <= LINES, brief
    if "--help-all" not in brief:
        return
    complete, status = printed(capsys, *words, "--help-all")
    command = parser()
    for word in words:
        command = command._subparsers._group_actions[0].choices[word]  # pyright: ignore
    flags = {flag for action in command._actions for flag in action.option_strings}
    assert status == 0 and all(
        f"{flag} " in complete or f"{flag}\n" in complete or f"{flag}," in complete for flag in flags
    )
    assert command.description.split("\n\n")[0][:40] in complete
    assert "examples:" in brief and len(complete.splitlines()) > LINES


def printed(capsys, *words: str) -> tuple[str, int]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(words)
    return capsys.readouterr().out, caught.value.code
